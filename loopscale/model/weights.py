"""The one table of weights: global names and shapes, how they start, and where Megatron's layers hold them.

Global names are free of layout: q, k and v are separate, gate and up are separate, layers are numbered over all
stages. Checkpoints, conversion and initialisation speak these names; the stage's modules hold some of them fused.

V vocabulary, d width, n query heads, g key/value heads, c head width, f feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
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
class Box:
    """A box of a global weight, from ``offsets`` on, ``sizes`` long. Its elements lie one after the other in the parameter
    that holds it, the first at the parameter's flat index ``start``."""

    weight: Weight
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


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

    def boxes(self, rank: int = 0, size: int = 1, first: int = 0, end: int | None = None) -> Iterator[Box]:
        """What elements ``first`` to ``end`` of the parameter, flat, on rank ``rank`` of ``size`` are of the global weights.

        The boxes of all ranks, or of one where the parameter is not divided, tile each weight; padding is in none. An
        interval of a matrix is at most three boxes: the end of a row, whole rows, the beginning of a row.
        """
        if self.tensor_axis is None:
            rank, size = 0, 1
        width = math.prod(self.weights[0].shape[1:]) // (size if self.tensor_axis == 1 else 1)
        column = rank * width if self.tensor_axis == 1 else 0
        row = 0
        for weight, rows, offset in self._runs(rank, size):
            begin, stop = max(first, row * width), row * width + min(rows, weight.shape[0] - offset) * width
            for r, c, height, breadth in _cut(begin, stop if end is None else min(stop, end), width):
                offsets, sizes = (offset + r - row, column + c), (height, breadth)
                axes = len(weight.shape)
                yield Box(weight, offsets[:axes], sizes[:axes], r * width + c)
            row += rows

    def views(self, held: Tensor, rank: int = 0, size: int = 1) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the whole parameter on rank ``rank`` of ``size``, each with its place in ``held``."""
        for box in self.boxes(rank, size):
            yield box, held.view(-1)[box.start : box.start + math.prod(box.sizes)].view(box.sizes)

    def _runs(self, rank: int, size: int) -> Iterator[tuple[Weight, int, int]]:
        """The parameter's rows from the first on: of which weight the next rows are, how many, and from which of its rows on."""
        if self.fused == "qkv":
            for group in range(rank * self.groups // size, (rank + 1) * self.groups // size):
                for weight in self.weights:
                    rows = weight.shape[0] // self.groups
                    yield weight, rows, group * rows
            return
        for weight in self.weights:
            rows = padded_rows(weight.shape[0], size) if self.padded else weight.shape[0]
            if self.tensor_axis == 0:
                rows //= size
                yield weight, rows, rank * rows
            else:
                yield weight, rows, 0


def _cut(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements ``begin`` to ``end`` of a matrix of ``width`` columns, row by row, as boxes: (row, column, rows, columns)."""
    while begin < end:
        row, column = divmod(begin, width)
        rows, columns = (
            (1, min(width - column, end - begin)) if column or end - begin < width else ((end - begin) // width, width)
        )
        yield row, column, rows, columns
        begin += rows * columns


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
