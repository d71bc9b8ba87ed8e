"""The one table of weights: global names and shapes, how they start, and where Megatron's layers hold them.

Global names are free of layout: q, k and v are separate, gate and up are separate, layers are numbered over all
stages. Checkpoints, conversion and initialisation speak these names; the stage's modules hold some of them fused.

V vocabulary, d width, n query heads, g key/value heads, c head width, f feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loopscale.config.tree import ModelConfig
from loopscale.randomness import normals, stream_key, truncated_normals, uniforms

Init = Literal["zeros", "ones", "identity", "half_log_five", "linear", "embedding"]


@dataclass(frozen=True)
class Weight:
    """One tensor under its global name. ``tensor_axis`` is the axis that tensor parallelism divides."""

    name: str
    shape: tuple[int, ...]
    init: Init
    tensor_axis: int | None = None


@dataclass(frozen=True)
class Holder:
    """A parameter of the stage's modules and the global weights it holds.

    ``fused``: "none"; "qkv", rows grouped by key/value head as [q of the group, k, v]; "gate_up", gate rows first.
    """

    parameter: str
    weights: tuple[Weight, ...]
    fused: Literal["none", "qkv", "gate_up"] = "none"
    groups: int = 1

    def split(self, held: Tensor) -> dict[str, Tensor]:
        """The global weights out of the held parameter (or a moment of its shape)."""
        if self.fused == "none":
            parts: tuple[Tensor, ...] = (held,)
        elif self.fused == "gate_up":
            parts = held.chunk(2)
        else:
            grouped = held.unflatten(0, (self.groups, -1))
            rows = [w.shape[0] // self.groups for w in self.weights]
            parts = tuple(p.flatten(0, 1) for p in grouped.split(rows, dim=1))
        return {w.name: p.contiguous() for w, p in zip(self.weights, parts, strict=True)}

    def join(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        parts = [weights[w.name] for w in self.weights]
        if self.fused == "none":
            return parts[0]
        if self.fused == "gate_up":
            return torch.cat(parts)
        return torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], dim=1).flatten(0, 1)


def holders(model: ModelConfig, max_positions: int) -> list[Holder]:
    """All parameters of a model, in a fixed order."""
    d, v = model.hidden_size, model.vocabulary
    table = [Holder("embedding.weight", (Weight("embedding.tokens", (v, d), "embedding", 0),))]
    if model.positions == "learned":
        table.append(Holder("positions.weight", (Weight("embedding.positions", (max_positions, d), "embedding"),)))
    for part, count in (("prelude", model.prelude_layers), ("core", model.core_layers), ("coda", model.coda_layers)):
        for i in range(count):
            table += _layer(model, f"{part}_block.layers.{i}", f"{part}.{i}")
    if model.inject == "ortho":
        table += [
            Holder("injection.A_log", (Weight("inject.A_log", (d,), "zeros"),)),
            Holder("injection.dt_bias", (Weight("inject.dt_bias", (d,), "half_log_five"),)),
            Holder("injection.weight", (Weight("inject.weight", (d, d), "identity"),)),
        ]
    if model.readout == "rmsnorm":
        table.append(Holder("readout.weight", (Weight("readout.norm", (d,), _gain(model)),)))
    if not model.tied_head:
        table.append(Holder("head.weight", (Weight("head", (v, d), "embedding", 0),)))
    return table


def _layer(model: ModelConfig, module: str, name: str) -> Iterator[Holder]:
    d, f, c = model.hidden_size, model.ffn_size, model.head_width
    q, kv = model.heads * c, model.key_value_heads * c
    yield Holder(f"{module}.input_layernorm.weight", (Weight(f"{name}.attention_norm", (d,), _gain(model)),))
    yield Holder(
        f"{module}.self_attention.linear_qkv.weight",
        tuple(Weight(f"{name}.{k}", (rows, d), "linear", 0) for k, rows in (("q", q), ("k", kv), ("v", kv))),
        "qkv",
        model.key_value_heads,
    )
    yield Holder(f"{module}.self_attention.linear_proj.weight", (Weight(f"{name}.out", (d, q), "linear", 1),))
    yield Holder(f"{module}.pre_mlp_layernorm.weight", (Weight(f"{name}.mlp_norm", (d,), _gain(model)),))
    yield Holder(
        f"{module}.mlp.linear_fc1.weight",
        (Weight(f"{name}.gate", (f, d), "linear", 0), Weight(f"{name}.up", (f, d), "linear", 0)),
        "gate_up",
    )
    yield Holder(f"{module}.mlp.linear_fc2.weight", (Weight(f"{name}.down", (d, f), "linear", 1),))


def _gain(model: ModelConfig) -> Init:
    return "zeros" if model.norm_centered else "ones"


def initial(weight: Weight, model: ModelConfig, seed: int) -> Tensor:
    """The weight's first value, fp32, a function of (seed, name) and the element's place alone.

    ``half_log_five`` is the bias at which softplus gives Δ = ½ ln 5, so that a = e^(−Δ) = 1/√5 (Paper B's code).
    """
    match weight.init:
        case "zeros":
            return torch.zeros(weight.shape)
        case "ones":
            return torch.ones(weight.shape)
        case "identity":
            return torch.eye(weight.shape[0])
        case "half_log_five":
            return torch.full(weight.shape, math.log(math.expm1(0.5 * math.log(5.0))))
    key = stream_key(seed, f"weight {weight.name}")
    rows, zero = torch.arange(weight.shape[0]), torch.zeros(1, dtype=torch.int64)
    width = weight.shape[1]
    if model.init_scheme == "pytorch":
        if weight.init == "embedding" and weight.name != "head":
            return normals(key, rows, zero, 0, width)
        return (2 * uniforms(key, rows, zero, 0, width) - 1) * width**-0.5
    if weight.init == "embedding":
        return truncated_normals(key, rows, zero, 0, width, cut=3.0) * model.hidden_size**-0.5
    return normals(key, rows, zero, 0, width) * model.init_std
