"""The loop's equilibrium on held-out sequences, in the course of a run and on a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from loopscale.config import Config
from loopscale.diagnostics.equilibrium import TruncationError, contraction, in_fp32, truncation_errors
from loopscale.diagnostics.norms import CONVERGED, NormMeter
from loopscale.evaluate.perplexity import loss_by_depth
from loopscale.model.inputs import Inputs
from loopscale.model.ring import Ring
from loopscale.model.stage import LoopedStage
from loopscale.parallel.mesh import Mesh, sum_over_ranks

ITERATIONS = 32
"""Power iterations in the course of a run: two visits each."""
GRADIENT_VISITS = (1, 2, 4, 8)
"""Truncations that are compared with full backprop, where the evaluation depth is larger, beside the run's own."""
MOST_VISITS = 128
"""At which the state is taken to be as near to its fixed point as it comes, if four times the evaluation depth are more."""


@dataclass(frozen=True)
class Equilibrium:
    """How a model nears the fixed point of its loop, at its evaluation depth R."""

    depth: int
    """R."""
    contraction: float | None
    """Spectral radius of a visit's Jacobian; None with several pipeline stages, for a visit crosses them."""
    truncation: dict[int, TruncationError]
    """By the visits b that carry gradient. Empty without injection: then the embeddings get a gradient by all visits alone."""
    change: list[float | None]
    """Mean relative change of the state by visit, up to 2 R, see :class:`NormMeter`."""
    converged: list[float | None]
    """Share of tokens whose relative change is below 0.03."""

    def as_json(self) -> dict[str, Any]:
        """What is not known is left out."""
        return {
            "depth": self.depth,
            **({} if self.contraction is None else {"contraction": self.contraction}),
            **({"truncation": {str(b): asdict(error) for b, error in self.truncation.items()}} if self.truncation else {}),
            "change": self.change,
            "converged": self.converged,
        }

    def in_words(self) -> str:
        """One line."""
        if not math.isfinite(self.contraction or 0.0) or not all(math.isfinite(e.error) for e in self.truncation.values()):
            return "cannot be told: states or gradients are not finite"
        parts = [] if self.contraction is None else [f"contraction {self.contraction:.2f}"]
        if self.truncation:
            parts.append("gradient error " + ", ".join(f"b={b} {found.error:.2g}" for b, found in self.truncation.items()))
        if self.converged[-1] is not None:
            parts.append(f"{self.converged[-1]:.0%} of tokens converged at depth {len(self.converged)}")
        return " · ".join(parts)

    def table(self) -> Table:
        """One row per number of visits: the state after as many, and the gradient through as many."""
        known = "" if self.contraction is None else f"contraction {self.contraction:.3f} a visit; "
        table = Table(
            title=f"equilibrium at depth {self.depth}",
            caption=f"{known}converged: change below {CONVERGED}; gradient of as many last visits against that of {self.depth}",
        )
        for heading in ("visits", "change", "converged", "gradient error", "cosine"):
            table.add_column(heading, justify="right")
        for visits, (change, converged) in enumerate(zip(self.change, self.converged, strict=True), 1):
            state = ("–", "–") if change is None or converged is None else (f"{change:.4f}", f"{converged:.1%}")
            error = self.truncation.get(visits)
            table.add_row(f"{visits}", *state, *(("", "") if error is None else (f"{error.error:.4f}", f"{error.cosine:.4f}")))
        return table


def diagnose(
    stage: LoopedStage, ring: Ring, mesh: Mesh, config: Config, microbatches: Sequence[Inputs], iterations: int = ITERATIONS
) -> Equilibrium:
    """Each replica passes its own microbatches, the same on all its ranks and maybe none; the result is that of all and the same
    on every rank. A collective. Changes nothing: gradients, None before, are None again."""
    depth = config.depth.evaluation_depth
    radius = None
    if mesh.stages == 1:
        visits = max(depth, min(4 * depth, MOST_VISITS))
        radius = contraction(stage, mesh, microbatches, visits=visits, iterations=iterations)
    meter = NormMeter(2 * depth, mesh.device)
    with in_fp32(stage):
        observe = meter.observe if mesh.sees_tokens else None
        loss_by_depth(stage, ring, mesh, microbatches, [2 * depth], observe=observe)
    states = meter.result(sum_over_ranks)
    truncation: dict[int, TruncationError] = {}
    tried = sorted(b for b in {*GRADIENT_VISITS, config.depth.gradient_visits(depth)} if b < depth)
    loop_is_trained = config.objective.kind != "exit_gate_stage2"
    if tried and loop_is_trained and config.model.inject != "none":
        trained = [(p, holder.tensor_axis is not None) for holder, p in stage.held() if p.requires_grad]
        truncation = truncation_errors(stage, ring.plan, mesh, microbatches, trained, depth=depth, gradient_visits=tried)
    return Equilibrium(depth, radius, truncation, states.change, states.converged)
