"""All that a diagnosis of the loop finds: its equilibrium, and the scale of its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from loopscale.config import Config
from loopscale.evaluate import equilibrium, scale
from loopscale.model.inputs import Inputs
from loopscale.model.ring import Ring
from loopscale.model.stage import LoopedStage
from loopscale.parallel.mesh import Mesh


@dataclass(frozen=True)
class Diagnosis:
    equilibrium: equilibrium.Equilibrium
    scale: scale.Scale

    def as_json(self) -> dict[str, Any]:
        return {"equilibrium": self.equilibrium.as_json(), "scale": self.scale.as_json()}

    def in_words(self) -> dict[str, str]:
        """One line of each."""
        return {"equilibrium": self.equilibrium.in_words(), "scale": self.scale.in_words()}

    def tables(self) -> Iterator[Table]:
        yield self.equilibrium.table()
        yield from self.scale.tables()


def diagnose(
    stage: LoopedStage, ring: Ring, mesh: Mesh, config: Config, microbatches: Sequence[Inputs],
    iterations: int = equilibrium.ITERATIONS,
) -> Diagnosis:  # fmt: skip
    """Each replica passes its own microbatches, the same on all its ranks and maybe none; the result is that of all and the same
    on every rank. A collective. Changes nothing: gradients, None before, are None again."""
    return Diagnosis(
        equilibrium.diagnose(stage, ring, mesh, config, microbatches, iterations),
        scale.diagnose(stage, ring, mesh, config, microbatches),
    )
