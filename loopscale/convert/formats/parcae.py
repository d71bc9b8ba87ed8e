"""Parcae (arXiv 2604.12946), the model `Parcae` of its release, with diagonal injection.

Its config.json names the class as `_class_name`; what its loader ignores (rope settings) is ignored here. Its ReLU² is halved:
rows of `mlp.proj` are twice ours. The gate of a value embedding reads 32 channels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open

from loopscale.config import Config
from loopscale.convert.formats.base import Format, Need, Values, count, must_be, number, wanted
from loopscale.convert.mapping import Ours, Rule
from loopscale.convert.tensors import SINGLE, Planned, write_shards
from loopscale.durable import replacing
from loopscale.errors import UsageError
from loopscale.model.weights import VALUE_GATE_CHANNELS, has_value_embedding

ROPE_BASE = 50_000.0
PICKLE = "pytorch_model.bin"


class Parcae(Format):
    name: ClassVar = "parcae"
    needs: ClassVar = (
        Need("model.layer_norm", ("pre",)),
        Need("model.activation", ("relu2",)),
        Need("model.inject", ("parcae",)),
        Need("model.qk_norm", (True,)),
        Need("model.value_embeddings", (True,)),
        Need("model.coda_linear", (True,)),
        Need("model.between", ("none",)),
        Need("model.readout", ("rmsnorm",)),
        Need("model.state_init", ("truncated_normal",)),
        Need("model.positions", ("rope",)),
        Need("model.rope_base", (ROPE_BASE,)),
        Need("model.qk_bias", (False,)),
        Need("model.coda_norm", (False,)),
        Need("model.exit_gate", ("none",)),
        Need("model.kv_heads", (None,)),
        Need("model.head_dim", (None,)),
    )
    buffers: ClassVar = ("freqs_cis",)

    def describes(self, about: Mapping[str, Any]) -> bool:
        return about.get("_class_name") == "ParcaeConfig"

    def values(self, about: Mapping[str, Any]) -> Values:
        for key, *allowed in (
            ("injection_type", "diagonal"), ("block_class_name", "TransformerPreNormBlock"), ("norm_class_name", "RMSNorm"),
            ("mlp_class_name", "BaseMLP"), ("nonlin_name", "ReLU2"), ("bias", False), ("qk_bias", False), ("qk_norm", True),
            ("prelude_norm", True), ("state_init", "like-init"), ("clip_qkv", None), ("logit_softcap", None),
            ("mup_model_scaling_factor", 1),
        ):  # fmt: skip
            wanted(about, key, object)
            must_be(about, key, *allowed)
        width, heads = count(about, "n_embd"), count(about, "num_attention_heads")
        inner = count(about, "intermediate_size")
        must_be(about, "num_key_value_heads", heads)
        must_be(about, "recurrent_embedding_dimension", width)
        must_be(about, "recurrent_intermediation_embedding_dimension", inner)
        must_be(about, "recurrent_num_attention_heads", None, heads)
        return {
            "model": {
                "vocab_size": count(about, "vocab_size"),
                "hidden_size": width,
                "heads": heads,
                "ffn_size": inner,
                "prelude_layers": count(about, "n_layers_in_prelude", 0),
                "core_layers": count(about, "n_layers_in_recurrent_block"),
                "coda_layers": count(about, "n_layers_in_coda", 0),
                "activation": "relu2",
                "qk_norm": True,
                "value_embeddings": True,
                "inject": "parcae",
                "state_init": "truncated_normal",
                "state_std": math.sqrt(2 / (5 * width)),
                "coda_linear": True,
                "tied_head": wanted(about, "tie_embeddings", bool),
                "rope_base": ROPE_BASE,
                "norm_eps": number(about, "norm_eps"),
                "norm_centered": False,
                "init_scheme": "scaled_zero",
            },
            "depth": {
                "prior": "poisson",
                "mean": count(about, "mean_recurrence"),
                "backprop": count(about, "mean_backprop_depth"),
                "per_sequence": wanted(about, "recurrent_iteration_method", str) == "per-sequence",
            },
            "corpus": {"sequence_length": count(about, "block_size")},
        }

    def about(self, config: Config) -> dict[str, Any]:
        model, depth = config.model, config.depth
        return {
            "_class_name": "ParcaeConfig",
            "block_size": config.corpus.sequence_length,
            "n_embd": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.heads,
            "vocab_size": model.vocabulary,
            "padding_multiple": 64,
            "padded_vocab_size": -(-model.vocabulary // 64) * 64,
            "block_class_name": "TransformerPreNormBlock",
            "norm_class_name": "RMSNorm",
            "norm_eps": model.norm_eps,
            "mlp_class_name": "BaseMLP",
            "nonlin_name": "ReLU2",
            "bias": False,
            "qk_bias": False,
            "qk_norm": True,
            "clip_qkv": None,
            "logit_softcap": None,
            "mup_model_scaling_factor": 1,
            "init_strategy": "scaled-zero",
            "init_orthogonal": True,
            "injection_type": "diagonal",
            "prelude_norm": True,
            "state_init": "like-init",
            "n_layers_in_prelude": model.prelude_layers,
            "n_layers_in_recurrent_block": model.core_layers,
            "n_layers_in_coda": model.coda_layers,
            "recurrent_embedding_dimension": model.hidden_size,
            "recurrent_intermediation_embedding_dimension": model.ffn_size,
            "recurrent_num_attention_heads": None,
            "mean_recurrence": depth.evaluation_depth,
            "mean_backprop_depth": depth.gradient_visits(depth.evaluation_depth),
            "sampling_scheme": "poisson-truncated-full",
            "recurrent_iteration_method": "per-sequence" if depth.per_sequence else "per-batch",
            "tie_embeddings": model.tied_head,
        }

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        model, ours = config.model, Ours.of(config.model, config.corpus.sequence_length)
        rows, layers = count(about, "padded_vocab_size"), list(ours.layers())
        rules = [ours.vocabulary("transformer.wte.weight", "embedding.tokens", rows)]
        for i, layer in enumerate(layers):
            at = _place(layer)
            rules += [
                ours.gain(f"{at}.norm_{n}.weight", f"{layer}.{x}_norm", centered=False) for n, x in ((1, "attention"), (2, "mlp"))
            ]
            rules += [ours.turned(f"{at}.attn.c_{x}.weight", f"{layer}.{x}", turn="pairs") for x in "qkv"]
            rules.append(ours.same(f"{at}.attn.c_proj.weight", f"{layer}.out"))
            if has_value_embedding(i, len(layers)):
                rules.append(ours.same(f"{at}.attn.ve_gate.weight", f"{layer}.value_gate"))
                rules.append(ours.vocabulary(f"value_embeds.{i}.weight", f"{layer}.value_embedding", rows))
            rules.append(ours.same(f"{at}.mlp.fc.weight", f"{layer}.up"))
            rules.append(ours.same(f"{at}.mlp.proj.weight", f"{layer}.down", times=2.0))
        rules += [
            ours.same(f"transformer.adapter.{x}", f"inject.{own}")
            for x, own in (("A_log",) * 2, ("dt_bias",) * 2, ("B", "weight"))
        ]
        rules.append(ours.gain("transformer.ln_prelude.weight", "inject.norm", centered=False))
        rules.append(ours.same("transformer.C.weight", "coda_linear"))
        rules.append(ours.gain("transformer.ln_f.weight", "readout.norm", centered=False))
        if not model.tied_head:
            rules.append(ours.vocabulary("lm_head.weight", "head", rows))
        return rules

    def write(
        self, folder: Path, config: Config, tensors: Sequence[Planned], dtype: torch.dtype, shard_bytes: int
    ) -> Iterator[int]:
        """One pickle, which is all that the release loads: of tensors in a file that is mapped to memory, and removed then."""
        if (folder / PICKLE).exists():
            yield sum(math.prod(t.shape) for t in tensors) * dtype.itemsize
            return
        yield from write_shards(folder, tensors, dtype, sys.maxsize)
        with safe_open(folder / SINGLE[0], "pt") as mapped, replacing(folder / PICKLE) as out:
            try:
                torch.save({tensor.name: mapped.get_tensor(tensor.name) for tensor in tensors}, out)
            except RuntimeError as error:
                raise error.__context__ or error from None  # behind a full disk's error torch has one of its own
        (folder / SINGLE[0]).unlink()

    def tied(self, config: Config) -> Mapping[str, str]:
        return {"lm_head.weight": "transformer.wte.weight"} if config.model.tied_head else {}

    def unlike(self, config: Config, names: Collection[str]) -> str | None:
        layers = list(Ours.of(config.model, config.corpus.sequence_length).layers())
        gated = {i for i, layer in enumerate(layers) if f"{_place(layer)}.attn.ve_gate.weight" in names}
        embedded = {i for i in range(len(layers)) if f"value_embeds.{i}.weight" in names}
        ours = {i for i in range(len(layers)) if has_value_embedding(i, len(layers))}
        if gated == embedded == ours:
            return None
        return (
            f"it has value embeddings for layers {_listed(embedded)} and gates for them in layers {_listed(gated)}; only both in "
            f"every other layer, the last one included, can be read"
        )

    def refuse_unfit(self, config: Config) -> None:
        super().refuse_unfit(config)
        layers = list(Ours.of(config.model, config.corpus.sequence_length).layers())
        ours, gated = {i for i in range(len(layers)) if has_value_embedding(i, len(layers))}, _gated(config)
        if gated != ours:
            raise UsageError(
                f"the model cannot be of the format parcae: value embeddings are in layers {_listed(ours)}, and gates for them "
                f"in layers {_listed(gated)} there; the number of core layers must be even, and that of all others together"
            )
        self.refuse_other(config, "model.state_std", math.sqrt(2 / (5 * config.model.hidden_size)))
        self.refuse_other(config, "model.embedding_multiplier", 1.0)
        if (width := config.model.hidden_size) < VALUE_GATE_CHANNELS:
            least = f"must be {VALUE_GATE_CHANNELS} at least there"
            raise UsageError(f"the model cannot be of the format parcae: model.hidden_size is {width}, {least}")


def _place(layer: str) -> str:
    """Where a layer of ours lies in their names."""
    part, number = layer.split(".")
    return f"transformer.{'core_block' if part == 'core' else part}.{number}"


def _gated(config: Config) -> set[int]:
    """Layers whose values their code gates. It asks for the parity of the last layer of the core's visits with gradient, and
    numbers the layers of the coda after all visits of the core."""
    model, visits = config.model, config.depth.evaluation_depth
    before = model.prelude_layers + model.core_layers
    last = model.core_layers * config.depth.gradient_visits(visits) - 1
    numbers = [i if i < before else i + model.core_layers * (visits - 1) for i in range(before + model.coda_layers)]
    return {i for i, number in enumerate(numbers) if number % 2 == last % 2}


def _listed(layers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"
