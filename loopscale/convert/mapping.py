"""Weights of another format, one rule each: which of ours a tensor of theirs is made of, and how they lie in it.

A rule holds in both directions. It moves elements, and at most doubles them or adds 1, so a round trip is exact; but a gain w
that is stored as w - 1 is rounded where w < 0.5, by up to 6e-8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loopscale.config.tree import ModelConfig
from loopscale.model.parameters import Weight
from loopscale.model.weights import Holder, holders, padded_rows

Turn = Literal["pairs", "halves"]
"""Which channels of a head rotary positions turn together: neighbours, or one of each half."""


@dataclass(frozen=True)
class Part:
    """A weight of ours as it lies in a tensor of theirs."""

    weight: Weight
    head: int = 0
    """Width of a head, where the rows of each lie in another order than ours."""
    turn: Turn = "pairs"
    """Theirs, if so."""

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    def out(self, ours: Tensor) -> Tensor:
        return reordered(ours, self.head, self.turn) if self.head else ours

    def back(self, theirs: Tensor) -> Tensor:
        return reordered(theirs, self.head, "halves" if self.turn == "pairs" else "pairs") if self.head else theirs


def reordered(rows: Tensor, head: int, into: Turn) -> Tensor:
    """The rows of every head of width ``head``, which lie as the other order has them, in the order ``into``."""
    shape = (2, head // 2) if into == "pairs" else (head // 2, 2)
    return rows.unflatten(0, (-1, *shape)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Rule:
    """A tensor of theirs: the rows of its parts, one after the other."""

    theirs: str
    parts: tuple[Part, ...]
    view: tuple[int, ...] | None = None
    """Its shape, where that is another than that of those rows."""
    added: float = 0.0
    """What theirs has more than ours."""
    times: float = 1.0
    """What theirs is of ours: a power of two."""
    padded: int = 0
    """Rows of theirs, where zeros follow behind ours."""
    groups: int = 1
    """Of the rows of each part: those of the first group of every part lie before those of the second."""
    spare: bool = False
    """Whether theirs may be read with more or fewer rows of padding than are written."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor of theirs."""
        return self.view or (self.padded or sum(p.rows for p in self.parts), *self.parts[0].weight.shape[1:])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of theirs of this shape can be read."""
        enough = self.spare and shape[:1] >= (sum(p.rows for p in self.parts),)
        return shape == self.shape or (enough and shape[1:] == self.shape[1:])

    def out(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs of ours, which are given in the order of the parts."""
        rows = [part.out(tensor) for part, tensor in zip(self.parts, ours, strict=True)]
        if self.groups > 1:
            rows = [torch.cat([r.unflatten(0, (self.groups, -1)) for r in rows], dim=1).flatten(0, 1)]
        missing = self.padded - sum(len(r) for r in rows) if self.padded else 0
        rows += [rows[0].new_zeros(missing, *rows[0].shape[1:])] if missing else []
        whole = torch.cat(rows) if len(rows) > 1 else rows[0]
        whole = whole + self.added if self.added else whole
        return (whole * self.times if self.times != 1 else whole).reshape(self.shape)

    def back(self, theirs: Tensor) -> list[Tensor]:
        """Ours of theirs, in the order of the parts."""
        sizes = [part.rows for part in self.parts]
        rows = theirs.reshape(-1, *self.parts[0].weight.shape[1:])[: sum(sizes)]
        rows = rows - self.added if self.added else rows
        rows = rows / self.times if self.times != 1 else rows
        if self.groups > 1:
            split = rows.unflatten(0, (self.groups, -1)).split([size // self.groups for size in sizes], dim=1)
            return [part.back(own.flatten(0, 1)) for part, own in zip(self.parts, split, strict=True)]
        return [part.back(own) for part, own in zip(self.parts, rows.split(sizes), strict=True)]


@dataclass(frozen=True)
class Ours:
    """The weights of a model of ours by global name, to make rules of."""

    model: ModelConfig
    weights: Mapping[str, Weight]

    @classmethod
    def of(cls, model: ModelConfig, positions: int) -> Ours:
        return cls(model, {w.name: w for holder in holders(model, positions) for w in holder.weights})

    def same(self, theirs: str, *ours: str, view: tuple[int, ...] | None = None, times: float = 1.0) -> Rule:
        """The rows of ``ours``, one after the other, ``times`` as large."""
        return Rule(theirs, tuple(Part(self.weights[name]) for name in ours), view, times=times)

    def gain(self, theirs: str, ours: str, centered: bool) -> Rule:
        """A norm's gain, stored as what it has above 1 where ``centered``."""
        return Rule(theirs, (Part(self.weights[ours]),), added=float(self.model.norm_centered) - float(centered))

    def vocabulary(self, theirs: str, ours: str, rows: int) -> Rule:
        """An embedding or a head, ``rows`` long with its padding."""
        return Rule(theirs, (Part(self.weights[ours]),), padded=rows)

    def turned(self, theirs: str, *ours: str, turn: Turn, view: tuple[int, ...] | None = None) -> Rule:
        """Rows of queries, keys and values; those of queries and keys lie as rotary positions turn them."""
        own: Turn = "pairs" if self.model.rope_interleaved else "halves"
        head = 0 if own == turn else self.model.head_width
        parts = (Part(self.weights[name], 0 if name.endswith(".v") else head, turn) for name in ours)
        return Rule(theirs, tuple(parts), view)

    def held(self, holder: Holder) -> Rule:
        """A parameter of our stage as a single rank has it. Several have other padding."""
        parts = tuple(Part(weight) for weight in holder.weights)
        padded = padded_rows(self.model.vocabulary, 1) if holder.padded else 0
        groups = holder.groups if holder.fused == "qkv" else 1
        return Rule(holder.parameter, parts, padded=padded, groups=groups, spare=holder.padded)

    def layers(self) -> Iterator[str]:
        """Names of the layers in their order over all parts: "prelude.0", …"""
        model = self.model
        for part, count in (("prelude", model.prelude_layers), ("core", model.core_layers), ("coda", model.coda_layers)):
            yield from (f"{part}.{n}" for n in range(count))
