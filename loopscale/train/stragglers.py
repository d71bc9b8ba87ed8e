"""Ranks that work longer at a step than others do at the same."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOW = 1.5
"""Times the median of its peers that a slow rank works."""
PEERS = 3
"""Ranks of a stage, at least, whose median is that of a sound one. Stages are not compared with each other: a plan's shares are
counted operations, and what else a stage does, and how well it does it, may well be half as much again."""
STEPS = 10
"""Steps, at least, that are judged together: one may be slow by chance."""
QUIET = 20
"""Judgements after a warning before the next."""
NAMED = 4


class Stragglers:
    """Judges the ranks of a run, each by its ``roles`` (in words) and its ``stages`` (ranks of one stage do the same work)."""

    def __init__(self, stages: Sequence[int], roles: Sequence[str]):
        self._stages, self._roles = stages, roles
        self._seconds, self._steps, self._quiet = [0.0] * len(stages), 0, 0

    def see(self, busy: Sequence[float], steps: int) -> str | None:
        """Takes the seconds that each rank worked at each of ``steps`` steps; a sentence on those that are slow, if it is time
        for one."""
        self._seconds = [sum_ + steps * own for sum_, own in zip(self._seconds, busy, strict=True)]
        self._steps += steps
        if self._steps < STEPS:
            return None
        seconds, self._seconds, self._steps = self._seconds, [0.0] * len(self._stages), 0
        self._quiet -= 1
        slow = [] if self._quiet > 0 else self._slow(seconds)
        if not slow:
            return None
        self._quiet = QUIET
        return "; ".join(slow[:NAMED]) + f"; and {len(slow) - NAMED} more" * (len(slow) > NAMED)

    def _slow(self, seconds: Sequence[float]) -> list[str]:
        found = []
        for stage in sorted(set(self._stages)):
            peers = [rank for rank, own in enumerate(self._stages) if own == stage]
            usual = median(seconds[rank] for rank in peers)
            for rank in peers if len(peers) >= PEERS else ():
                if seconds[rank] > SLOW * usual:
                    times = seconds[rank] / max(usual, 1e-9)
                    sentence = (
                        f"rank {rank} ({self._roles[rank]}) works {times:.1f} times as long at a step as the median of the "
                        f"{len(peers)} ranks of its stage"
                    )
                    found.append((-times, sentence))
        return [sentence for _, sentence in sorted(found)]
