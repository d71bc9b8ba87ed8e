"""The page of an exported model: what it is, how it is used, and what was measured of it, which may be nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loopscale.config import Config
from loopscale.config.tree import ModelConfig

_TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- looped-transformer
- loopscale
---

# {name}

A looped language model: {before} before the loop, a block of {core} that is visited R times, {after} behind it. {parameters:,}
parameters, states {width} wide, a vocabulary of {vocabulary:,} tokens, trained on sequences of {length:,} tokens, R = {depth} by
default. A base model: it goes on with text.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
words = tokenizer("My fellow citizens", return_tensors="pt")
print(tokenizer.decode(model.generate(**words, depth={depth}, max_new_tokens=64)[0]))
```

`forward` and `generate` take, beyond the usual:

- `depth`: how often the block is visited.
- `kv`: `"visit"` keeps keys and values of every visit, {visit_banks} banks at R = {depth}; `"terminal"` of the last one alone,
  {terminal_banks} banks at any R, which gives other logits: later tokens see the earlier ones as their last visit left them.
- `exit_kl`{gate}: the loop ends earlier where one more visit changes little.
- `output_hidden_states`: the state after every visit.
{samples}
Text is encoded as in training: no token is put before a document, and a special token that a text spells out is plain characters.

## Measured

{measured}
{made}"""
_SAMPLES = "- `samples`: numbers of the rows, which key the noise of the initial state; 0, 1, … by default.\n"


def card(config: Config, parameters: int, run: Path | None, checkpoint: str) -> str:
    """The page in Markdown, of a model with that many ``parameters``; ``run``: the folder that tells of its training, if any."""
    model, depth = config.model, config.depth.evaluation_depth
    outside = model.prelude_layers + model.coda_layers
    return _TEXT.format(
        name=f"{run.resolve().name}, {checkpoint}" if run is not None else checkpoint,
        before=_layers(model.prelude_layers),
        core=_layers(model.core_layers),
        after=_layers(model.coda_layers),
        parameters=parameters,
        width=model.hidden_size,
        vocabulary=model.vocabulary,
        length=config.corpus.sequence_length,
        depth=depth,
        visit_banks=outside + depth * model.core_layers,
        terminal_banks=outside + model.core_layers,
        gate=_gate(model),
        samples=_SAMPLES if model.state_init in ("normal", "truncated_normal") else "",
        measured="\n".join(_measured(run, checkpoint)) or "Nothing was measured of this checkpoint.",
        made="" if run is None else _made(_read(run / "manifest.json")),
    )


def _layers(count: int) -> str:
    return "no layer" if count == 0 else "1 layer" if count == 1 else f"{count} layers"


def _gate(model: ModelConfig) -> str:
    return "" if model.exit_gate == "none" else ", or by the model's gate `exit_probability`"


def _measured(run: Path | None, checkpoint: str) -> Iterator[str]:
    """Of each evaluation of this checkpoint that went through depths, its protocol and a table."""
    for path in sorted((run / "evaluations").glob("*.json")) if run is not None else ():
        found = _read(path)
        if found.get("checkpoint") != checkpoint or not {"depths", "loss", "perplexity", "source"} <= found.keys():
            continue
        sequences, length, tokens = (found.get(key, 0) for key in ("sequences", "sequence_length", "tokens"))
        yield f"{found['source']}: {sequences:,} sequences of {length:,}, {tokens:,} tokens. {found.get('protocol', '')}.\n"
        yield "| depth R | loss (nats a token) | perplexity | bits a byte |\n|---|---|---|---|"
        bits = found.get("bits_per_byte") or [None] * len(found["depths"])
        for depth, loss, perplexity, spent in zip(found["depths"], found["loss"], found["perplexity"], bits, strict=True):
            yield f"| {depth} | {loss:.4f} | {perplexity:.2f} | {'–' if spent is None else f'{spent:.3f}'} |"
        for name, loss in found.get("baselines", {}).items():
            yield f"| {name} table | {loss:.4f} | | |"
        yield ""


def _made(manifest: Mapping[str, Any]) -> str:
    if not manifest:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    revision = manifest.get("git", {}).get("revision")
    at = f", at revision {revision}" if revision else ""
    return f"\n## Made\n\nTrained from {manifest.get('created')} on with seed {manifest.get('seed')}, by {versions}{at}.\n"


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none, or not all of it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
