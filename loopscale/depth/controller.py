"""What decides the law of the depths, and what it hears of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loopscale.depth.priors import Prior


@dataclass(frozen=True)
class GroupSums:
    """What one depth group tells all ranks: Σ loss of the last exit over its scored tokens, and their number. Both were
    added up in fp64."""

    depth: int
    loss: float
    tokens: int


class DepthController(Protocol):
    """Every rank has one and tells it the same, so that all draw from the same law."""

    def at(self, progress: float) -> Prior:
        """The law of the next step, when ``progress``, 0 to 1, of all steps are done."""

    def update(self, groups: Sequence[GroupSums]) -> None:
        """Hears of a step that was applied. Skipped ones are not told."""

    def figures(self) -> dict[str, float]:
        """What a log shows beside the law."""

    def state(self) -> dict[str, Any]:
        """What it has learned, JSON-able: it goes into checkpoints."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a :meth:`state`."""

    def digest(self) -> str:
        """Names the state: equal on two ranks when they draw from the same law."""
