"""Llama (`LlamaForCausalLM` of transformers) and Mistral without a window: plain models, which are loops of one visit.

Positions turn the halves of a head. All layers become the core; :mod:`loopscale.convert.retrofit` makes other loops of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopscale.config import Config
from loopscale.convert.formats.base import (
    Format,
    Need,
    Values,
    as_transformers_has_it,
    count,
    must_be,
    number,
    values_of_transformers,
)
from loopscale.convert.formats.hf import by_transformers, write_tokenizer_config
from loopscale.convert.mapping import Ours, Rule, Turn

TENSORS = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight", "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
ROPE_BASE = 10_000.0
"""Of a `config.json` that tells none: transformers' own."""
DENSE: dict[str, Any] = {
    "prelude_layers": 0,
    "coda_layers": 0,
    "layer_norm": "pre",
    "activation": "swiglu",
    "inject": "none",
    "state_init": "embedding",
    "rope_interleaved": False,
    "norm_centered": False,
}
"""What a plain model is among ours."""


class Llama(Format):
    name: ClassVar = "llama"
    tensors: ClassVar[Mapping[str, str]] = TENSORS
    """Their names of ours; those of a layer follow behind that of the layer, and before `.weight`."""
    turn: ClassVar[Turn] = "halves"
    needs: ClassVar = (
        Need("depth.evaluation_depth", (1,)),
        Need("model.layer_norm", ("pre",)),
        Need("model.activation", ("swiglu",)),
        Need("model.inject", ("none",)),
        Need("model.state_init", ("embedding",)),
        Need("model.between", ("none",)),
        Need("model.readout", ("rmsnorm", "final_only")),
        Need("model.positions", ("rope",)),
        Need("model.qk_norm", (False,)),
        Need("model.qk_bias", (False,)),
        Need("model.value_embeddings", (False,)),
        Need("model.coda_norm", (False,)),
        Need("model.coda_linear", (False,)),
        Need("model.exit_gate", ("none",)),
        Need("model.embedding_multiplier", (1.0,)),
    )

    def describes(self, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") in ("llama", "mistral")

    def values(self, about: Mapping[str, Any]) -> Values:
        must_be(about, "model_type", "llama", "mistral")
        must_be(about, "hidden_act", "silu")
        for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
            must_be(about, key, False)
        window = 4096 if about["model_type"] == "mistral" else None  # where the file does not tell
        must_be({"sliding_window": window, **about}, "sliding_window", None)
        groups = {"num_key_value_heads": about.get("num_attention_heads")}  # where the file does not tell
        return {
            "model": {
                **DENSE,
                **values_of_transformers({**groups, **about}),
                "core_layers": count(about, "num_hidden_layers"),
                "rope_base": _rope_base(about),
            },
            "depth": {"prior": "fixed", "mean": 1, "backprop": None},
            "corpus": {"sequence_length": count(about, "max_position_embeddings")},
        }

    def about(self, config: Config) -> dict[str, Any]:
        model = config.model
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **as_transformers_has_it(config),
            "num_hidden_layers": model.prelude_layers + model.core_layers + model.coda_layers,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        return rules_of_transformers(config, self.tensors, self.turn)

    def tied(self, config: Config) -> Mapping[str, str]:
        return {self.tensors["head"]: self.tensors["embed"]} if config.model.tied_head else {}

    def finish(self, folder: Path, config: Config, dtype: torch.dtype, run: Path | None, checkpoint: str) -> None:
        write_tokenizer_config(folder, config.corpus.sequence_length)

    def logits(self, folder: Path, tokens: Tensor, depths: Sequence[int]) -> Tensor | None:
        return by_transformers(folder, tokens, depths)


def rules_of_transformers(config: Config, names: Mapping[str, str], turn: Turn) -> list[Rule]:
    """Of embedding, layers with the norms that are named, last norm and head, as :attr:`Llama.tensors` names them."""
    ours, norms = Ours.of(config.model, config.corpus.sequence_length), [own for own in names if own.endswith("_norm")]
    rules = [ours.same(names["embed"], "embedding.tokens")]
    for i, layer in enumerate(ours.layers()):
        at = {own: f"{names['layer'].format(i)}{theirs}.weight" for own, theirs in names.items()}
        rules += [ours.gain(at[x], f"{layer}.{x}", centered=False) for x in norms]
        rules += [ours.turned(at[x], f"{layer}.{x}", turn=turn) for x in "qkv"]
        rules += [ours.same(at[x], f"{layer}.{x}") for x in ("out", "gate", "up", "down")]
    rules.append(ours.gain(names["norm"], "readout.norm", centered=False))
    if not config.model.tied_head:
        rules.append(ours.same(names["head"], "head"))
    return rules


def _rope_base(about: Mapping[str, Any]) -> float:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = about.get(key) or {}
        if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type", "default")) != "default":
            must_be(about, key, None)
    return number({"rope_theta": ROPE_BASE, **about, **(about.get("rope_parameters") or {})}, "rope_theta")
