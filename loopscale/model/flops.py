"""Matrix-product operations of a training step, counting the loops that actually run.

A product of a weight with N parameters costs 2N operations per token forwards and 4N more backwards. Attention scores
are left out, as the published figures leave them out; recomputed visits are not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from loopscale.config.tree import ModelConfig
from loopscale.model.parameters import Weight
from loopscale.model.weights import holders
from loopscale.parallel.ring.plan import Costs, Work


@dataclass(frozen=True)
class Counts:
    """Parameters by what they do. The ``*_matmul`` ones enter a matrix product once per use of their part."""

    total: int
    embedding: int
    """Embeddings (of values too) and an untied head: what "non-embedding" leaves out."""
    prelude_matmul: int
    core_matmul: int
    visit_matmul: int
    """What a visit multiplies beside the core: the half of a linear injection that the state enters."""
    exit_matmul: int
    core: int

    def effective(self, depth: int) -> int:
        """Parameters of the unrolled model: every visit counted as a core of its own."""
        return self.total + (depth - 1) * self.core


def count(model: ModelConfig, max_positions: int) -> Counts:
    """Parameter counts of a model, without building it."""
    table = [(holder.parameter, weight) for holder in holders(model, max_positions) for weight in holder.weights]
    head, square = model.vocabulary * model.hidden_size, model.hidden_size**2
    injected = _matrices(table, ("injection",))
    per_visit = square if model.inject == "huginn_linear" else 0  # the half that the state enters; the rest is once
    return Counts(
        total=sum(prod(w.shape) for _, w in table),
        embedding=sum(prod(w.shape) for _, w in table if w.kind == "embedding"),
        prelude_matmul=_matrices(table, ("prelude_block",)) + injected - per_visit,
        core_matmul=_matrices(table, ("core_block",)),
        visit_matmul=per_visit,
        exit_matmul=_matrices(table, ("coda",)) + head,
        core=sum(prod(w.shape) for parameter, w in table if parameter.startswith("core_block")),
    )


def training_flops(counts: Counts, work: Work, gated: bool = False) -> int:
    """Operations per token of one microbatch: 6 per parameter with gradient, 2 without.

    An exit decodes one state; a ``gated`` one those of all visits that carry gradient. Where no visit does, the gate alone
    is trained: everything runs forwards only, and the gate has seen the states of all visits.
    """
    forward_only = work.depth - work.gradient_visits
    visits = (6 * work.gradient_visits + 2 * forward_only) * (counts.core_matmul + counts.visit_matmul)
    if not work.gradient_visits:
        return 2 * counts.prelude_matmul + visits + 2 * work.depth * counts.exit_matmul
    decoded = work.gradient_visits if gated else len(work.exits)
    return 6 * counts.prelude_matmul + visits + 6 * decoded * counts.exit_matmul


def operation_costs(counts: Counts, layers: int, slices: Sequence[int], *, decoded: int = 1, recompute: bool = False) -> Costs:
    """Operations per token of everything that a ring plan orders; a guess at the times, the same on every machine.

    ``slices``: core layers of each stage, of ``layers`` in all; ``decoded``: states that an exit decodes; ``recompute``: a
    visit, and the prelude, run again before or in their backward.
    """
    layer = counts.core_matmul / layers
    forward = tuple(2 * (own * layer + (counts.visit_matmul if s == 0 else 0)) for s, own in enumerate(slices))
    backward = tuple((3 if recompute else 2) * cost for cost in forward)
    prelude_backward = (6 if recompute else 4) * counts.prelude_matmul
    exit = 6.0 * decoded * counts.exit_matmul
    return Costs(2 * counts.prelude_matmul, forward, backward, exit, prelude_backward)


def matmul_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's products and the head's: what a machine's own rate is measured on."""
    d, f = model.hidden_size, model.ffn_size
    q, kv = model.heads * model.head_width, model.key_value_heads * model.head_width
    inner = 2 * f if model.activation == "swiglu" else f
    return [(d, q + 2 * kv), (q, d), (d, inner), (f, d), (d, model.vocabulary)]


def _matrices(table: Iterable[tuple[str, Weight]], parts: tuple[str, ...]) -> int:
    """Elements of the matrices that multiply activations, in the given parts of the model."""
    kinds = ("matrix", "injection", "coda_linear")
    return sum(prod(w.shape) for parameter, w in table if parameter.startswith(parts) and w.kind in kinds and len(w.shape) == 2)
