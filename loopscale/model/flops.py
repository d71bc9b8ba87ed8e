"""Matrix-product operations of a training step, counting the loops that actually run.

A product of a weight with N parameters costs 2N operations per token forwards and 4N more backwards. Attention scores
are left out, as the published figures leave them out; recomputed visits are not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from loopscale.config.tree import ModelConfig
from loopscale.model.weights import Holder, holders
from loopscale.parallel.ring.plan import Work


@dataclass(frozen=True)
class Counts:
    """Parameters by what they do. The ``*_matmul`` ones enter a matrix product once per use of their part."""

    total: int
    embedding: int
    """Embeddings and an untied head: what "non-embedding" leaves out."""
    prelude_matmul: int
    core_matmul: int
    exit_matmul: int
    core: int

    def effective(self, depth: int) -> int:
        """Parameters of the unrolled model: every visit counted as a core of its own."""
        return self.total + (depth - 1) * self.core


def count(model: ModelConfig, max_positions: int) -> Counts:
    """Parameter counts of a model, without building it."""
    table = holders(model, max_positions)
    head = model.vocabulary * model.hidden_size
    embeddings = [h for h in table if h.parameter.startswith(("embedding", "positions", "head"))]
    return Counts(
        total=sum(map(_elements, table)),
        embedding=sum(map(_elements, embeddings)),
        prelude_matmul=_matrices(table, ("prelude", "injection")),
        core_matmul=_matrices(table, ("core",)),
        exit_matmul=_matrices(table, ("coda",)) + head,
        core=sum(_elements(h) for h in table if h.parameter.startswith("core")),
    )


def training_flops(counts: Counts, work: Work) -> int:
    """Operations per token of one microbatch: 6 per parameter with gradient, 2 without."""
    forward_only = work.depth - work.gradient_visits
    return (
        6 * counts.prelude_matmul
        + (6 * work.gradient_visits + 2 * forward_only) * counts.core_matmul
        + 6 * len(work.exits) * counts.exit_matmul
    )


def matmul_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's products and the head's: what a machine's own rate is measured on."""
    d, f = model.hidden_size, model.ffn_size
    q, kv = model.heads * model.head_width, model.key_value_heads * model.head_width
    return [(d, q + 2 * kv), (q, d), (d, 2 * f), (f, d), (d, model.vocabulary)]


def _elements(holder: Holder) -> int:
    return sum(prod(w.shape) for w in holder.weights)


def _matrices(table: Iterable[Holder], parts: tuple[str, ...]) -> int:
    return sum(_elements(h) for h in table if h.parameter.startswith(parts) and len(h.weights[0].shape) == 2)
