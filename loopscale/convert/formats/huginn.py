"""Huginn (arXiv 2502.05171), `RavenForCausalLM` of its release: model_type huginn_raven.

Its normalised state goes into the coda and is not fed on; the adapter sees the state as the core left it. Its code scales
embeddings by sqrt(n_embd), draws states of variance 2/5, and pairs neighbouring channels for positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from loopscale.config import Config
from loopscale.convert.formats.base import Format, Need, Values, count, must_be, number, wanted
from loopscale.convert.mapping import Ours, Rule


class Huginn(Format):
    name: ClassVar = "huginn"
    needs: ClassVar = (
        Need("model.layer_norm", ("sandwich",)),
        Need("model.activation", ("swiglu",)),
        Need("model.inject", ("huginn_linear",)),
        Need("model.coda_norm", (True,)),
        Need("model.between", ("none",)),
        Need("model.readout", ("rmsnorm",)),
        Need("model.state_init", ("truncated_normal",)),
        Need("model.positions", ("rope",)),
        Need("model.qk_norm", (False,)),
        Need("model.value_embeddings", (False,)),
        Need("model.coda_linear", (False,)),
        Need("model.exit_gate", ("none",)),
        Need("model.kv_heads", (None,)),
        Need("model.head_dim", (None,)),
    )
    buffers: ClassVar = ("freqs_cis",)

    def describes(self, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") == "huginn_raven"

    def values(self, about: Mapping[str, Any]) -> Values:
        must_be(about, "block_class_name", "SandwichBlock")
        must_be(about, "norm_class_name", "RMSNorm_llama")
        must_be(about, "mlp_class_name", "GatedMLP")
        must_be(about, "nonlin_name", "SiLU")
        must_be(about, "injection_type", "linear")
        must_be(about, "state_init", "like-init")
        width, heads = (
            count(about, "n_embd"),
            count(about, "n_heads" if "n_heads" in about else "num_attention_heads"),
        )
        must_be(about, "num_key_value_heads", heads)
        return {
            "model": {
                "vocab_size": count(about, "vocab_size"),
                "hidden_size": width,
                "heads": heads,
                "ffn_size": count(about, "intermediate_size"),
                "prelude_layers": count(about, "n_layers_in_prelude", 0),
                "core_layers": count(about, "n_layers_in_recurrent_block"),
                "coda_layers": count(about, "n_layers_in_coda", 0),
                "layer_norm": "sandwich",
                "qk_bias": wanted(about, "qk_bias", bool),
                "embedding_multiplier": math.sqrt(width),
                "inject": "huginn_linear",
                "inject_bias": wanted(about, "bias", bool),
                "state_init": "truncated_normal",
                "state_std": math.sqrt(2 / 5),
                "coda_norm": True,
                "tied_head": wanted(about, "tie_embeddings", bool),
                "rope_base": number(
                    {"rope_base": 50_000, **about}, "rope_base"
                ),  # the release's file does not have it, its code does
                "norm_eps": number(about, "norm_eps"),
                "norm_centered": False,
            },
            "depth": {
                "prior": "lognormal_poisson",
                "mean": count(about, "mean_recurrence"),
                "cap": 256,
                "backprop": count(about, "mean_backprop_depth"),
            },
            "corpus": {"sequence_length": count(about, "block_size")},
        }

    def about(self, config: Config) -> dict[str, Any]:
        model, width = config.model, config.model.hidden_size
        layers = (model.prelude_layers, model.core_layers, model.coda_layers)
        return {
            "architectures": ["RavenForCausalLM"],
            "model_type": "huginn_raven",
            "n_embd": width,
            "n_heads": model.heads,
            "n_layers": sum(layers),
            "block_size": config.corpus.sequence_length,
            "vocab_size": model.vocabulary,
            "padding_multiple": 1,
            "tie_embeddings": model.tied_head,
            "intermediate_size": model.ffn_size,
            "bias": model.inject_bias,
            "architecture_class_name": "RecurrentGPT",
            "block_class_name": "SandwichBlock",
            "norm_class_name": "RMSNorm_llama",
            "norm_eps": model.norm_eps,
            "mlp_class_name": "GatedMLP",
            "nonlin_name": "SiLU",
            "init_strategy": "takase",
            "init_orthogonal": False,
            "state_init": "like-init",
            "injection_type": "linear",
            "n_layers_in_prelude": layers[0],
            "n_layers_in_recurrent_block": layers[1],
            "n_layers_in_coda": layers[2],
            "mean_recurrence": config.depth.evaluation_depth,
            "sampling_scheme": "poisson-lognormal-filling",
            "mean_backprop_depth": config.depth.gradient_visits(config.depth.evaluation_depth),
            "qk_bias": model.qk_bias,
            "activation_checkpoint_impl": "per-iteration",
            "rope_base": model.rope_base,
            "torch_dtype": "float32",
        }

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        model, ours = config.model, Ours.of(config.model, config.corpus.sequence_length)
        rules = [ours.same("transformer.wte.weight", "embedding.tokens")]
        for layer in ours.layers():
            part, number = layer.split(".")
            at = f"transformer.{'core_block' if part == 'core' else part}.{number}"
            for i, norm in enumerate(("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"), 1):
                rules.append(ours.gain(f"{at}.norm_{i}.weight", f"{layer}.{norm}", centered=False))
            rules.append(ours.turned(f"{at}.attn.Wqkv.weight", *(f"{layer}.{x}" for x in "qkv"), turn="pairs"))
            if model.qk_bias:
                view = (2, 1, model.heads, model.head_width)
                biases = (f"{layer}.q_bias", f"{layer}.k_bias")
                rules.append(ours.turned(f"{at}.attn.qk_bias", *biases, turn="pairs", view=view))
            rules.append(ours.same(f"{at}.attn.proj.weight", f"{layer}.out"))
            rules.append(ours.same(f"{at}.mlp.fc.weight", f"{layer}.gate", f"{layer}.up"))
            rules.append(ours.same(f"{at}.mlp.proj.weight", f"{layer}.down"))
        rules.append(ours.same("transformer.adapter.weight", "inject.weight"))
        if model.inject_bias:
            rules.append(ours.same("transformer.adapter.bias", "inject.bias"))
        rules.append(ours.gain("transformer.ln_f.weight", "readout.norm", centered=False))
        if not model.tied_head:
            rules.append(ours.same("lm_head.weight", "head"))
        return rules

    def tied(self, config: Config) -> Mapping[str, str]:
        return {"lm_head.weight": "transformer.wte.weight"} if config.model.tied_head else {}

    def refuse_unfit(self, config: Config) -> None:
        super().refuse_unfit(config)
        self.refuse_other(config, "model.embedding_multiplier", math.sqrt(config.model.hidden_size))
        self.refuse_other(config, "model.state_std", math.sqrt(2 / 5))
