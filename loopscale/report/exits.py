"""What ``loopscale eval RUN --exits`` wrote of a run: perplexity and speed at each fixed depth and under each early exit."""

from __future__ import annotations

from pydantic import BaseModel, Field, PositiveInt


class Measured(BaseModel):
    """Of one way to leave the loop."""

    loss: float | None
    """Nats per token."""
    tokens_per_second: float | None


class AtDepth(Measured):
    depth: PositiveInt


class ByRule(Measured):
    mean_loops: float | None
    exits: list[float] = []
    """Share that leaves after loop 1, 2, …"""


class Amount(BaseModel):
    sequences: int


class Exits(BaseModel):
    """One evaluation of early exits; keys that no page shows are passed over.

    Raises ``ValueError`` where it is made of something else.
    """

    created: str = ""
    checkpoint: str
    source: str = ""
    protocol: str = ""
    depth: PositiveInt
    """K, of the last fixed depth."""
    target: float = Field(gt=0)
    """Thresholds are the fastest whose perplexity is at most this many times that at K, on the calibration sequences."""
    calibration: Amount | None = None
    measured: Amount | None = None
    fixed: list[AtDepth]
    rules: dict[str, ByRule]

    @property
    def age(self) -> tuple[int, str]:
        """Larger where the checkpoint is newer, of one checkpoint where the evaluation is."""
        step = self.checkpoint.rpartition("-")[2]
        return int(step) if step.isdecimal() else -1, self.created
