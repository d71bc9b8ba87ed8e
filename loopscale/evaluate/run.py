"""``loopscale eval``: perplexity at every depth, beside a unigram and a bigram table on the same tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loopscale.checkpoint.restore import Restored, restore
from loopscale.config.tree import CorpusConfig
from loopscale.corpus.baselines import baselines
from loopscale.corpus.batches import collate
from loopscale.corpus.packing import PackedCorpus, Sample, pack_text
from loopscale.corpus.tokenizer import unknown
from loopscale.durable import finite, write_json
from loopscale.environment.compute import set_threads
from loopscale.errors import DataError, UsageError
from loopscale.evaluate.diagnosis import Diagnosis, diagnose
from loopscale.evaluate.perplexity import loss_by_depth, perplexity
from loopscale.model.flops import count
from loopscale.model.inputs import Inputs
from loopscale.model.ring import Ring

PROTOCOL = (
    "full forward over whole sequences, own keys and values at every visit, attention within documents, first token of a "
    "document not scored, fp32"
)

Step = TypeVar("Step")

DIAGNOSED, ITERATIONS = 16, 64
"""Sequences that a diagnosis reads, and its power iterations."""


@dataclass(frozen=True)
class Evaluation:
    """Losses in nats per scored token."""

    checkpoint: str
    source: str
    losses: dict[int, float]
    tokens: int
    bytes: int | None
    """UTF-8 bytes of the scored tokens; None where some of them are unknown words, whose bytes no loss accounts for."""
    sequences: int
    sequence_length: int
    baselines: dict[str, float]
    first_depth_divergence: float
    """Mean KL, in nats, from the next-token distribution at the training depth to that at depth 1."""
    diagnosis: Diagnosis | None = None
    """Of the loop, where it was asked for."""

    def bits_per_byte(self, loss: float) -> float | None:
        return None if self.bytes is None else loss * self.tokens / self.bytes / math.log(2)

    def as_json(self) -> dict[str, Any]:
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "checkpoint": self.checkpoint,
            "source": self.source,
            "depths": list(self.losses),
            "loss": list(self.losses.values()),
            "perplexity": [perplexity(x) for x in self.losses.values()],
            "bits_per_byte": [self.bits_per_byte(x) for x in self.losses.values()],
            "tokens": self.tokens,
            "sequences": self.sequences,
            "sequence_length": self.sequence_length,
            "baselines": self.baselines,
            "first_depth_divergence": self.first_depth_divergence,
            "protocol": PROTOCOL,
            **({} if self.diagnosis is None else self.diagnosis.as_json()),
        }


def evaluate(
    where: str | Path, *, depths: str | None = None, text: Path | None = None, sequences: int | None = None, batch: int = 16,
    diagnosed: bool = False,
) -> Evaluation:  # fmt: skip
    """Evaluates a run's newest checkpoint, or one checkpoint; prints a table and writes ``RUN/evaluations/*.json``. With
    ``diagnosed`` also how its loop nears its fixed point and what its loss sees of the state's scale, on the first sequences."""
    restored = restore(where)
    set_threads(None, 1)
    wanted = parse_depths(depths, restored.config.depth.evaluation_depth)
    corpus = restored.config.corpus
    samples, source = held_out(restored, text, sequences)
    console = Console()
    tell_notes(restored, console)
    shown = tracked(microbatches(restored, samples, batch), f"{len(samples)} sequences", -(-len(samples) // batch), console)
    ring = Ring.of(restored.config, count(restored.config.model, corpus.sequence_length))
    losses, tokens = loss_by_depth(restored.stage, ring, restored.mesh, shown, wanted)
    evaluation = Evaluation(
        checkpoint=restored.checkpoint,
        source=source,
        losses=losses,
        tokens=tokens,
        bytes=scored_bytes(restored, samples),
        sequences=len(samples),
        sequence_length=corpus.sequence_length,
        baselines=_baselines(corpus, samples),
        first_depth_divergence=_divergence(restored, next(microbatches(restored, samples, batch))),
        diagnosis=_diagnose(restored, ring, samples[:DIAGNOSED], batch) if diagnosed else None,
    )
    console.print(_table(evaluation, restored.config.depth.evaluation_depth))
    tell_broken(restored, losses.values(), console)
    for table in evaluation.diagnosis.tables() if evaluation.diagnosis is not None else ():
        console.print(table)
    write(restored, "held-out" if text is None else f"text-{text.name}", evaluation.as_json(), console)
    return evaluation


def parse_depths(text: str | None, mean: int) -> tuple[int, ...]:
    """ "1-10" or "1,2,5" as depths; None gives 1 to twice the mean."""
    if text is None:
        return tuple(range(1, 2 * mean + 1))
    depths: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(f'--depths {text!r} is not a list of depths below 10,000 such as "1-10" or "1,2,5"')
        depths.update(range(first, last + 1))
    return tuple(sorted(depths))


# ---- what every measurement on held-out sequences shares


def held_out(restored: Restored, text: Path | None, sequences: int | None) -> tuple[Sequence[Sample], str]:
    """The first ``sequences`` of the validation split, or of a text file, and what to call it.

    Raises :class:`UsageError` where there is no such corpus or file, :class:`DataError` where no token can be scored."""
    samples, source = _of_corpus(restored.config.corpus, sequences) if text is None else _of_text(restored, text, sequences)
    if not any((s.targets >= 0).any() for s in samples):
        raise DataError(f"{source} holds no token to score; it needs two at least")
    return samples, source


def _of_corpus(config: CorpusConfig, sequences: int | None) -> tuple[Sequence[Sample], str]:
    packed = PackedCorpus(config.path, "validation", config.sequence_length, cache=config.cache, verify=config.verify)
    count = min(sequences or len(packed), len(packed))
    return [packed[i] for i in range(count)], f"validation split of {config.path}"


def _of_text(restored: Restored, text: Path, sequences: int | None) -> tuple[Sequence[Sample], str]:
    if not text.is_file():
        raise UsageError(f"--text {text} is not a file")
    tokenizer, eos = restored.tokenizer, restored.end_of_text
    samples = pack_text(text, tokenizer, eos, restored.config.corpus.sequence_length)
    if not samples:
        raise DataError(f"{text} holds fewer tokens than one sequence of {restored.config.corpus.sequence_length}")
    return samples[:sequences], text.name


def microbatches(restored: Restored, samples: Sequence[Sample], batch: int, first: int = 0) -> Iterator[Inputs]:
    """``batch`` sequences at a time, the last with what is left; sample numbers, which key the initial state, count from
    ``first``."""
    device = restored.stage.head_weight.device
    for begin in range(0, len(samples), batch):
        part = samples[begin : begin + batch]
        numbered = collate(list(part), range(first + begin, first + begin + len(part)))
        yield Inputs.of(numbered, device, final_visit=restored.config.depth.evaluation_depth, purpose="evaluation")


def tell_notes(restored: Restored, console: Console) -> None:
    """A line for each newer checkpoint that is damaged."""
    for note in restored.notes:
        console.print(f"! {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def tell_broken(restored: Restored, losses: Iterable[float], console: Console) -> None:
    """A line where a loss is not a number."""
    if not all(map(math.isfinite, losses)):
        sentence = (
            f"losses are not finite: weights of {restored.checkpoint} are NaN, infinite or so large that a product overflows"
        )
        console.print(f"! {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def tracked(steps: Iterable[Step], description: str, total: int, console: Console) -> Iterable[Step]:
    """``steps`` under a bar that shows on a terminal alone."""
    return track(
        steps, description=description, total=total, console=console, disable=not console.is_terminal, transient=True
    )  # fmt: skip


def write(restored: Restored, name: str, content: dict[str, Any], console: Console) -> None:
    """RUN/evaluations/CHECKPOINT-``name``.json, where the checkpoint lies in a run; numbers that are not finite are null."""
    if restored.run_folder is None:
        return
    place = restored.run_folder / "evaluations" / f"{restored.checkpoint}-{name}.json"
    place.parent.mkdir(exist_ok=True)
    write_json(place, finite(content))
    console.print(f"written {place}", highlight=False, soft_wrap=True)


# ---- what else an evaluation says


@torch.no_grad()
def _divergence(restored: Restored, inputs: Inputs) -> float:
    stage, mean = restored.stage, restored.config.depth.evaluation_depth
    feed, state, log_probabilities = stage.prelude(inputs), None, {}
    for r in range(1, mean + 1):
        state = stage.visit(inputs, feed, state, r)
        if r in (1, mean):
            log_probabilities[r] = stage.logits(stage.decode(inputs, state, r)).log_softmax(-1)
    deep, first = log_probabilities[mean], log_probabilities[1]
    return float((deep.exp() * (deep - first)).sum(-1).mean())


def _diagnose(restored: Restored, ring: Ring, samples: Sequence[Sample], batch: int) -> Diagnosis:
    restored.stage.requires_grad_(True)
    try:
        inputs = list(microbatches(restored, samples, batch))
        return diagnose(restored.stage, ring, restored.mesh, restored.config, inputs, ITERATIONS)
    finally:
        restored.stage.requires_grad_(False)


def _baselines(config: CorpusConfig, samples: Sequence[Sample]) -> dict[str, float]:
    """Unigram and bigram losses from the training split, on the same tokens; none when the corpus is gone."""
    try:
        train = PackedCorpus(config.path, "train", config.sequence_length, cache=config.cache, verify=config.verify)
    except (UsageError, DataError):
        return {}
    inputs = torch.stack([s.tokens[:-1] for s in samples]).numpy()
    return baselines(train, inputs, torch.stack([s.targets for s in samples]).numpy())


def scored_bytes(restored: Restored, samples: Sequence[Sample]) -> int | None:
    tokenizer, unspelt = restored.tokenizer, unknown(restored.tokenizer)
    scored = [s.targets[s.targets >= 0].tolist() for s in samples]
    if any(unspelt in tokens for tokens in scored):
        return None
    return sum(len(text.encode()) for text in tokenizer.decode_batch(scored))


def _table(evaluation: Evaluation, mean: int) -> Table:
    table = Table(
        title=f"{evaluation.checkpoint} on {evaluation.source}: {evaluation.sequences:,} sequences, {evaluation.tokens:,} tokens",
        caption=f"{PROTOCOL}. KL from depth {mean} to depth 1: {evaluation.first_depth_divergence:.3f} nats a token",
    )
    for heading in ("depth", "loss", "perplexity", "bits/byte", "× unigram"):
        table.add_column(heading, justify="right")
    unigram = evaluation.baselines.get("unigram")

    def row(name: str, loss: float) -> None:
        ratio = "–" if unigram is None else f"{perplexity(loss - unigram):.3f}"
        bits = evaluation.bits_per_byte(loss)
        table.add_row(name, f"{loss:.4f}", f"{perplexity(loss):.2f}", "–" if bits is None else f"{bits:.3f}", ratio)

    for depth, loss in evaluation.losses.items():
        row(f"{depth}{' (training mean)' if depth == mean else ''}", loss)
    for name, loss in evaluation.baselines.items():
        row(f"{name} table", loss)
    return table
