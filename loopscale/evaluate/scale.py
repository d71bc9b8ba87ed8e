"""What a model's losses see of the scale of its state, on held-out sequences, in the course of a run and on a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from loopscale.config import Config
from loopscale.diagnostics.equilibrium import in_fp32
from loopscale.diagnostics.norms import NormMeter, NormSpread
from loopscale.diagnostics.scale import ScaleMeter, Sight, clamped_losses
from loopscale.evaluate.perplexity import loss_by_depth
from loopscale.model.inputs import Inputs
from loopscale.model.ring import Ring
from loopscale.model.stage import LoopedStage
from loopscale.parallel.mesh import Mesh, max_over_ranks, sum_over_ranks


@dataclass(frozen=True)
class Scale:
    """Of the loops up to the evaluation depth R. Losses are in nats per scored token."""

    depth: int
    """R."""
    norms: NormSpread
    sight: Sight
    first_loss: float
    """At depth 1."""
    loss: float
    """At depth R."""
    clamped: dict[str, float] | None
    """Loss at depth R with each token held at the RMS of loop 1 ("rms"), or moved across its direction alone ("radial"). None
    with several pipeline stages, where a visit cannot be run by hand."""

    @property
    def gap(self) -> float:
        """Perplexity at depth 1 over that at depth R: near 1 with large norms where the loop has frozen (Paper A)."""
        return math.exp(min(self.first_loss - self.loss, 700.0))

    @property
    def clamp_changes(self) -> dict[str, float]:
        return {name: loss - self.loss for name, loss in (self.clamped or {}).items()}

    def as_json(self) -> dict[str, Any]:
        """What is not known is left out."""
        sight, motions = self.sight, [None if m is None else asdict(m) for m in self.sight.motions]
        names = ("growth", "growth_predicted", "angle", "angle_predicted")
        return {
            "depth": self.depth,
            "norms": asdict(self.norms),
            **({} if sight.radial_fractions is None else {"radial_fraction": sight.radial_fractions}),
            "motion": {name: [None if m is None else m[name] for m in motions] for name in names},
            "loss": self.loss,
            "depth_gap": self.gap,
            "scaled_loss": {f"{factor:g}": loss for factor, loss in sight.scaled_losses.items()},
            **({} if self.clamped is None else {"clamp": self.clamp_changes}),
            "token_correlation": sight.token_correlation,
        }

    def in_words(self) -> str:
        """One line."""
        parts = [f"norm {self.norms.mean[0]:.3g} to {self.norms.mean[-1]:.3g} in {self.depth} loops"] if self.norms.mean else []
        if (radial := (self.sight.radial_fractions or [None])[-1]) is not None:
            parts.append(f"radial gradient {radial:.1e}")
        if self.sight.motions[-1] is not None:
            parts.append(f"last loop turns by {self.sight.motions[-1].angle:.2g} rad")
        parts += [f"ppl@1 / ppl@{self.depth} {self.gap:.3g}", f"token correlation {self.sight.token_correlation:.2f}"]
        return " · ".join(parts)

    def tables(self) -> list[Table]:
        """Norms by loop, how the state moves by loop, and the losses of states of another scale; 80 columns suffice."""
        return [self._norms_table(), self._motion_table(), self._loss_table()]

    def _norms_table(self) -> Table:
        table = Table(
            title="norms of tokens by loop (L2)",
            caption="radial: |⟨g, h⟩| / (‖g‖ ‖h‖), g the gradient of the loop's own loss; next to 0 where it cannot see the norm",
        )
        for heading in ("loop", "mean", "median", "p99", "max", "std", "radial"):
            table.add_column(heading, justify="right")
        norms, fractions = self.norms, self.sight.radial_fractions
        for i, spread in enumerate(zip(norms.mean, norms.median, norms.p99, norms.max, norms.std, strict=True)):
            radial = "–" if fractions is None or (fraction := fractions[i]) is None else f"{fraction:.1e}"
            table.add_row(f"{i + 1}", *(f"{x:.3g}" for x in spread), radial)
        return table

    def _motion_table(self) -> Table:
        table = Table(
            title="how a loop moves tokens",
            caption=f"of norm and direction (radians), predicted to first order in 1/norm; ppl at depth 1 over {self.depth}: "
            f"{self.gap:.3f}; cosine between tokens at last: {self.sight.token_correlation:.3f}",
        )
        for heading in ("loop", "growth", "predicted", "turn", "predicted"):
            table.add_column(heading, justify="right")
        for loop, m in enumerate(self.sight.motions, 1):
            numbers = () if m is None else (m.growth, m.growth_predicted, m.angle, m.angle_predicted)
            table.add_row(f"{loop}", *([f"{x:.3g}" for x in numbers] or ["–"] * 4))
        return table

    def _loss_table(self) -> Table:
        table = Table(title=f"loss at depth {self.depth} by scale of the state")
        for heading in ("state", "loss", "change"):
            table.add_column(heading, justify="right")
        named = {f"× {factor:g}": loss for factor, loss in self.sight.scaled_losses.items()}
        words = {"rms": "at the RMS of loop 1", "radial": "without radial motion"}
        for name, loss in (named | {words[name]: loss for name, loss in (self.clamped or {}).items()}).items():
            table.add_row(name, f"{loss:.4f}", f"{loss - self.loss:+.4f}")
        return table


def diagnose(stage: LoopedStage, ring: Ring, mesh: Mesh, config: Config, microbatches: Sequence[Inputs]) -> Scale:
    """Each replica passes its own microbatches, the same on all its ranks and maybe none; the result is that of all and the same
    on every rank. A collective. Leaves no gradients in parameters."""
    depth = config.depth.evaluation_depth
    loop_is_trained = config.objective.kind != "exit_gate_stage2"  # else exits have no gradient by the state
    norms = NormMeter(depth, mesh.device)
    meter = ScaleMeter(stage, mesh, microbatches, depth, differentiate=loop_is_trained)

    def observe(microbatch: int, visit: int, before: Tensor | None, after: Tensor) -> None:
        if mesh.sees_tokens:
            norms.observe(microbatch, visit, before, after)
        meter.observe(microbatch, visit, before, after)

    with in_fp32(stage):
        losses, tokens = loss_by_depth(stage, ring, mesh, microbatches, [1, depth], sum_over_ranks, observe)
        clamped = None
        if mesh.stages == 1:
            clamped = clamped_losses(stage, mesh, microbatches, depth, sum_over_ranks, tokens)
    sight = meter.result(sum_over_ranks, tokens)
    return Scale(depth, norms.spread(sum_over_ranks, max_over_ranks), sight, losses[1], losses[depth], clamped)
