"""The one table of weights: global names and shapes, how they start, and where Megatron's layers hold them.

Global names are free of layout: q, k and v are separate, gate and up are separate, layers are numbered over all
stages. Checkpoints, conversion and initialisation speak these names; the stage's modules hold some of them fused.

V vocabulary, d width, n query heads, g key/value heads, c head width, f feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscale.config.registry import INJECTIONS, READOUTS, find
from loopscale.config.tree import ModelConfig
from loopscale.model.parameters import Init, Kind, Weight, norm_gain
from loopscale.randomness import normals, stream_key, truncated_normals, uniforms

VOCABULARY_MULTIPLE = 64
"""Rows of an embedding or a head are held padded to a multiple of this: products of odd sizes are slow on GPUs."""


def padded_rows(vocabulary: int, tensor_size: int) -> int:
    """Rows that ``tensor_size`` ranks together hold of a vocabulary. Padding enters no result, and no checkpoint."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_size)
    return -(-vocabulary // multiple) * multiple


@dataclass(frozen=True)
class Holder:
    """A parameter of the stage's modules and the global weights it holds, or of each a tensor-parallel rank's share.

    ``fused``: "none"; "qkv", rows grouped by key/value head as [q of the group, k, v]; "gate_up", gate rows first.
    ``padded``: rows follow behind the real ones, see :func:`padded_rows`.
    """

    parameter: str
    weights: tuple[Weight, ...]
    fused: Literal["none", "qkv", "gate_up"] = "none"
    groups: int = 1
    padded: bool = False

    @property
    def tensor_axis(self) -> int | None:
        """The axis that tensor parallelism divides."""
        return self.weights[0].tensor_axis

    def split(self, shares: Sequence[Tensor]) -> dict[str, Tensor]:
        """The global weights out of what all tensor-parallel ranks hold of the parameter, or of a moment of it."""
        if self.tensor_axis is None:
            return self.shares(shares[0], 1)
        parts = [self.shares(share, len(shares)) for share in shares]
        whole = {w.name: torch.cat([p[w.name] for p in parts], self.tensor_axis) for w in self.weights}
        return {w.name: whole[w.name][: w.shape[0]] for w in self.weights}

    def join(self, weights: Mapping[str, Tensor], rank: int = 0, size: int = 1) -> Tensor:
        """The inverse of :meth:`split`: what rank ``rank`` of ``size`` holds."""
        if self.tensor_axis is None:
            rank, size = 0, 1
        parts = [self._share(weights[w.name], rank, size) for w in self.weights]
        if self.fused == "none":
            return parts[0]
        if self.fused == "gate_up":
            return torch.cat(parts)
        return torch.cat([p.unflatten(0, (self.groups // size, -1)) for p in parts], dim=1).flatten(0, 1)

    def _share(self, weight: Tensor, rank: int, size: int) -> Tensor:
        if self.padded:
            weight = F.pad(weight, (0, 0, 0, padded_rows(len(weight), size) - len(weight)))
        return weight if size == 1 else weight.chunk(size, self.tensor_axis or 0)[rank]

    def shares(self, held: Tensor, size: int) -> dict[str, Tensor]:
        """The shares of the global weights in what one of ``size`` tensor-parallel ranks holds of the parameter."""
        if self.fused == "none":
            parts: tuple[Tensor, ...] = (held,)
        elif self.fused == "gate_up":
            parts = held.chunk(2)
        else:
            grouped = held.unflatten(0, (self.groups // size, -1))
            rows = [w.shape[0] // self.groups for w in self.weights]
            parts = tuple(p.flatten(0, 1) for p in grouped.split(rows, dim=1))
        return {w.name: p.contiguous() for w, p in zip(self.weights, parts, strict=True)}


VALUE_GATE_CHANNELS = 32
"""Channels of a layer's input that gate its value embedding (Parcae's code)."""


def holders(model: ModelConfig, max_positions: int) -> list[Holder]:
    """All parameters of a model, in a fixed order."""
    d, v = model.hidden_size, model.vocabulary
    table = [_vocabulary("embedding.weight", "embedding.tokens", (v, d), "embedding")]
    if model.positions == "learned":
        table.append(_single("positions.weight", "embedding.positions", (max_positions, d), "embedding", "embedding"))
    index, layers = 0, model.prelude_layers + model.core_layers + model.coda_layers
    for part, count in (("prelude", model.prelude_layers), ("core", model.core_layers), ("coda", model.coda_layers)):
        for i in range(count):
            with_values = model.value_embeddings and has_value_embedding(index, layers)
            table += _layer(model, f"{part}_block.layers.{i}", f"{part}.{i}", with_values)
            index += 1
    for name, shape, init, kind in () if model.inject == "none" else find(INJECTIONS[model.inject]).weights(model):
        table.append(_single(f"injection.{name}", f"inject.{name}", shape, init, kind))
    if model.between == "rmsnorm":
        table.append(_single("between.norm.weight", "between.norm", (d,), norm_gain(model), "norm"))
    if model.between == "damping":
        table.append(_single("between.damping", "between.damping", (1,), "two", "scalar"))
    if model.coda_linear:
        table.append(_single("coda_linear.weight", "coda_linear", (d, d), "identity", "coda_linear"))
    for name, shape, init, kind in find(READOUTS[model.readout]).weights(model):
        table.append(_single(f"readout.{name}", f"readout.{name}", shape, init, kind))
    if model.exit_gate != "none":
        table.append(_single("gate.weight", "gate.weight", (1, d), "uniform", "matrix"))
        table.append(_single("gate.bias", "gate.bias", (1,), "zeros", "bias"))
    if not model.tied_head:
        table.append(_vocabulary("head.weight", "head", (v, d), "head"))
    return table


def has_value_embedding(index: int, layers: int) -> bool:
    """Whether layer ``index`` of ``layers`` (over prelude, core and coda) has one: every other, the last included."""
    return index % 2 == (layers - 1) % 2


def _single(parameter: str, name: str, shape: tuple[int, ...], init: Init, kind: Kind, axis: int | None = None) -> Holder:
    return Holder(parameter, (Weight(name, shape, init, kind, axis),))


def _vocabulary(parameter: str, name: str, shape: tuple[int, ...], init: Init) -> Holder:
    return Holder(parameter, (Weight(name, shape, init, "embedding", 0),), padded=True)


def _layer(model: ModelConfig, module: str, name: str, with_values: bool) -> Iterator[Holder]:
    d, f, c = model.hidden_size, model.ffn_size, model.head_width
    q, kv = model.heads * c, model.key_value_heads * c
    attention, mlp = f"{module}.self_attention", f"{module}.mlp"
    yield _single(f"{module}.input_layernorm.weight", f"{name}.attention_norm", (d,), norm_gain(model), "norm")
    rows = (("q", q), ("k", kv), ("v", kv))
    qkv = tuple(Weight(f"{name}.{k}", (n, d), "linear", "matrix", 0) for k, n in rows)
    yield Holder(f"{attention}.linear_qkv.weight", qkv, "qkv", model.key_value_heads)
    if model.qk_bias:
        yield _single(f"{attention}.core_attention.q_bias", f"{name}.q_bias", (q,), "zeros", "bias", 0)
        yield _single(f"{attention}.core_attention.k_bias", f"{name}.k_bias", (kv,), "zeros", "bias", 0)
    if with_values:
        gate = (model.key_value_heads, min(VALUE_GATE_CHANNELS, d))
        yield _single(f"{attention}.value_gate.weight", f"{name}.value_gate", gate, "uniform", "matrix", 0)
        yield _single(
            f"{attention}.value_embedding.weight", f"{name}.value_embedding", (model.vocabulary, kv), "embedding", "embedding", 1
        )
    yield _single(f"{attention}.linear_proj.weight", f"{name}.out", (d, q), "output", "matrix", 1)
    if model.layer_norm != "pre":
        yield _single(f"{module}.self_attn_bda.norm.weight", f"{name}.attention_post_norm", (d,), norm_gain(model), "norm")
    yield _single(f"{module}.pre_mlp_layernorm.weight", f"{name}.mlp_norm", (d,), norm_gain(model), "norm")
    if model.activation == "swiglu":
        fused = (Weight(f"{name}.gate", (f, d), "linear", "matrix", 0), Weight(f"{name}.up", (f, d), "linear", "matrix", 0))
        yield Holder(f"{mlp}.linear_fc1.weight", fused, "gate_up")
    else:
        yield _single(f"{mlp}.linear_fc1.weight", f"{name}.up", (f, d), "linear", "matrix", 0)
    yield _single(f"{mlp}.linear_fc2.weight", f"{name}.down", (d, f), "output", "matrix", 1)
    if model.layer_norm != "pre":
        yield _single(f"{module}.mlp_bda.norm.weight", f"{name}.mlp_post_norm", (d,), norm_gain(model), "norm")


def initial(weight: Weight, model: ModelConfig, seed: int) -> Tensor:
    """The weight's first value, fp32, a function of (seed, name) and the element's place alone.

    ``decay``: the bias at which Δ = softplus(bias) = 1; ``decay_half_log_five``: Δ = ½ ln 5, so that
    a = e^(−Δ) = 1/√5 (Paper B's code). ``uniform``: within 1/sqrt(inputs), as PyTorch's linear.
    """
    match weight.init:
        case "zeros":
            return torch.zeros(weight.shape)
        case "ones":
            return torch.ones(weight.shape)
        case "two":
            return torch.full(weight.shape, 2.0)
        case "identity":
            return torch.eye(weight.shape[0])
        case "decay":
            return torch.full(weight.shape, math.log(math.expm1(1.0)))
        case "decay_half_log_five":
            return torch.full(weight.shape, math.log(math.expm1(0.5 * math.log(5.0))))
    key = stream_key(seed, f"weight {weight.name}")
    rows, zero = torch.arange(weight.shape[0]), torch.zeros(1, dtype=torch.int64)
    width, d = weight.shape[1], model.hidden_size
    if weight.init == "uniform" or (model.init_scheme == "pytorch" and weight.init != "embedding"):
        return (2 * uniforms(key, rows, zero, 0, width) - 1) * width**-0.5
    if model.init_scheme == "pytorch" or "value_embedding" in weight.name:
        return normals(key, rows, zero, 0, width)
    if model.init_scheme == "normal":
        if weight.init in ("embedding", "head"):
            return truncated_normals(key, rows, zero, 0, width, cut=3.0) * d**-0.5
        return normals(key, rows, zero, 0, width) * model.init_std
    std = math.sqrt(2 / (5 * d))
    if weight.init == "output":
        std = 0.0 if model.init_scheme == "scaled_zero" else std / math.sqrt(2 * model.init_depth)
    return truncated_normals(key, rows, zero, 0, width, cut=3.0) * std
