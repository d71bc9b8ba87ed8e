"""What ``loopscale eval RUN --exits`` wrote of a run: perplexity and speed at each fixed depth and under each early exit."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

LOOPS = 1024
"""More of them no configuration allows."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Depth = Annotated[int, Field(strict=True, ge=1, le=LOOPS)]


class Measured(BaseModel):
    """Of one way to leave the loop."""

    loss: Annotated[Number, Field(ge=0, le=700)] | None
    """Nats per token."""
    tokens_per_second: Annotated[Number, Field(gt=0)] | None


class AtDepth(Measured):
    depth: Depth


class ByRule(Measured):
    mean_loops: Annotated[Number, Field(ge=1, le=LOOPS)] | None
    exits: Annotated[list[Annotated[Number, Field(ge=0, le=1)]], Field(max_length=LOOPS)] = []
    """Share that leaves after loop 1, 2, …"""


class Amount(BaseModel):
    sequences: Annotated[int, Field(strict=True, ge=0)]


class Exits(BaseModel):
    """One evaluation of early exits; keys that no page shows are passed over.

    Raises ``ValueError`` where it is made of something else.
    """

    created: str = ""
    checkpoint: Annotated[str, Field(pattern=r"^step-[0-9]{1,15}$")]
    source: str = ""
    protocol: str = ""
    depth: Depth
    """K, of the last fixed depth."""
    target: Annotated[Number, Field(ge=1, le=100)]
    """Thresholds are the fastest whose perplexity is at most this many times that at K, on the calibration sequences."""
    calibration: Amount | None = None
    measured: Amount | None = None
    fixed: Annotated[list[AtDepth], Field(max_length=LOOPS)]
    rules: Annotated[dict[str, ByRule], Field(max_length=16)]

    @property
    def age(self) -> tuple[int, str]:
        """Larger where the checkpoint is newer, of one checkpoint where the evaluation is."""
        return self.step, self.created

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return int(self.checkpoint.removeprefix("step-"))
