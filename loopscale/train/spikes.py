"""When a step's loss counts as a spike.

The rule is Hampel's identifier (F. R. Hampel, *The influence curve and its role in robust estimation*, 1974): a value is an
outlier beyond median + k · 1.4826 · MAD, where the median absolute deviation times 1.4826 estimates the standard deviation
of normal values, and a few outliers among them do not move it. That steps are skipped for it, six deviations beyond the last
128 losses, is OLMo's practice (OLMo-core's `SkipStepOptimizer`, with mean and standard deviation); that a run goes back to a
checkpoint and on behind the samples in question, PaLM's (arXiv 2204.02311, §5.1).

Depths need care: they are drawn anew at every step, and a group of depth 1 has a higher loss than one of depth 10 without
being a fault. So what is judged is the cross entropy at the last visit of each depth group, less the median of the groups of
its depth in the window; what a step's groups have beyond that, weighted by tokens, is its excess, and the rule is applied to
excesses. Under a fixed depth that is the rule on the losses themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscale.depth import GroupSums

NEAR = 2**0.25
"""Depths within this factor are compared with each other: each depth up to 5 with itself alone."""
SEEN = 4
"""Groups of a depth that the window must hold before another one is judged by them."""
NORMAL = 1.4826
"""Standard deviation of a normal law over its median absolute deviation, 1 / Φ⁻¹(3/4)."""

StepLosses = list[tuple[int, float, int]]
"""(depth, mean loss, scored tokens) of each depth group of a step; JSON keeps it."""


@dataclass(frozen=True)
class Spike:
    """A step's loss beyond what its depths let expect, and what is allowed: nats per token."""

    excess: float
    allowed: float


def losses_of(groups: Sequence[GroupSums]) -> StepLosses:
    """What the window keeps of a step."""
    return [(g.depth, g.loss / g.tokens, g.tokens) for g in groups if g.tokens]


def find_spike(step: StepLosses, before: Sequence[StepLosses], threshold: float, window: int) -> Spike | None:
    """Whether ``step`` is a spike after the last ``window`` good steps, of which ``before`` has those there are.

    Nothing is one before the window is half full, while its losses do not differ at all, or where too few groups of about the
    same depths are known. A pure function of its arguments: equal on all ranks that add up the same losses.
    """
    before = before[-window:]
    if 2 * len(before) < window or not step:
        return None
    numbers = np.array([(t, *group) for t, groups in enumerate((*before, step)) for group in groups], np.float64)
    of_step, depths, losses, tokens = numbers.T
    known = of_step < len(before)
    expected = np.full(len(losses), np.nan)
    for depth in np.unique(depths):
        alike = known & (np.maximum(depths, depth) <= NEAR * np.minimum(depths, depth))
        if alike.sum() >= SEEN:
            expected[depths == depth] = np.median(losses[alike])
    excesses = _means(of_step, losses - expected, tokens, len(before) + 1)
    earlier, excess = excesses[:-1][np.isfinite(excesses[:-1])], excesses[-1]
    if not np.isfinite(excess):
        return None
    middle = np.median(earlier)
    allowed = float(threshold * NORMAL * np.median(np.abs(earlier - middle)))
    beyond = float(excess - middle)
    return Spike(beyond, allowed) if beyond > allowed > 0 else None


def _means(
    of_step: NDArray[np.float64], values: NDArray[np.float64], weights: NDArray[np.float64], steps: int
) -> NDArray[np.float64]:
    """Weighted mean of each step's finite values; NaN where it has none."""
    finite = np.isfinite(values)
    places, values, weights = of_step[finite].astype(np.int64), values[finite], weights[finite]
    with np.errstate(invalid="ignore"):
        return np.bincount(places, values * weights, steps) / np.bincount(places, weights, steps)
