"""Ouro (arXiv 2510.25741), `OuroForCausalLM`: the whole stack looped, its final norm after every loop, and an exit gate on it.

Its positions turn the halves of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
from loopscale.convert.formats.llama import TENSORS as LLAMA
from loopscale.convert.formats.llama import rules_of_transformers
from loopscale.convert.mapping import Ours, Rule

TENSORS = LLAMA | {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "input_layernorm_2",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_attention_layernorm_2",
}


class Ouro(Format):
    name: ClassVar = "ouro"
    needs: ClassVar = (
        Need("model.layer_norm", ("branch",)),
        Need("model.activation", ("swiglu",)),
        Need("model.prelude_layers", (0,)),
        Need("model.coda_layers", (0,)),
        Need("model.inject", ("none",)),
        Need("model.state_init", ("embedding",)),
        Need("model.between", ("shared",)),
        Need("model.readout", ("rmsnorm",)),
        Need("model.exit_gate", ("normed",)),
        Need("model.positions", ("rope",)),
        Need("model.qk_norm", (False,)),
        Need("model.qk_bias", (False,)),
        Need("model.value_embeddings", (False,)),
        Need("model.coda_norm", (False,)),
        Need("model.coda_linear", (False,)),
        Need("model.embedding_multiplier", (1.0,)),
    )

    def describes(self, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") == "ouro"

    def values(self, about: Mapping[str, Any]) -> Values:
        must_be(about, "hidden_act", "silu")
        must_be(about, "attention_bias", False)
        must_be(about, "use_sliding_window", False)
        must_be(about, "rope_scaling", None)
        if set(about.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            must_be(about, "layer_types", None)
        return {
            "model": {
                **values_of_transformers(about),
                "prelude_layers": 0,
                "core_layers": count(about, "num_hidden_layers"),
                "coda_layers": 0,
                "layer_norm": "branch",
                "inject": "none",
                "state_init": "embedding",
                "between": "shared",
                "exit_gate": "normed",
                "rope_base": number(about, "rope_theta"),
                "rope_interleaved": False,
                "norm_centered": False,
            },
            "depth": {"prior": "fixed", "mean": count(about, "total_ut_steps"), "backprop": None},
            "objective": {"kind": "exit_gate"},
            "corpus": {"sequence_length": count(about, "max_position_embeddings")},
        }

    def about(self, config: Config) -> dict[str, Any]:
        model = config.model
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            **as_transformers_has_it(config),
            "num_hidden_layers": model.core_layers,
            "layer_types": ["full_attention"] * model.core_layers,
            "use_sliding_window": False,
            "total_ut_steps": config.depth.evaluation_depth,
            "early_exit_threshold": 1.0,
            "torch_dtype": "float32",
        }

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        ours = Ours.of(config.model, config.corpus.sequence_length)
        gate = [ours.same(f"model.early_exit_gate.{x}", f"gate.{x}") for x in ("weight", "bias")]
        return rules_of_transformers(config, TENSORS, "halves") + gate

    def tied(self, config: Config) -> Mapping[str, str]:
        return {TENSORS["head"]: TENSORS["embed"]} if config.model.tied_head else {}
