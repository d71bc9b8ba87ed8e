"""Learning rate by step."""

from __future__ import annotations

import math

from loopscale.config.tree import OptimizerConfig

_FIRST = 1e-4
"""Where warm-up begins, as a share of the peak (Paper B)."""


def share_of_peak(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate as a share of its peak, which AdamW and Muon have in common.

    Linear warm-up from 1e-4 of the peak; then flat and a cosine or a line to ``final`` over the last ``decay_share``
    (wsd), one cosine to ``final`` (cosine), or flat (constant).
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return _FIRST + (1 - _FIRST) * (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    decay = round(config.decay_share * steps) if config.schedule == "wsd" else steps - warmup
    done = step + 1 - (steps - decay)
    if done <= 0:
        return 1.0
    if config.schedule == "wsd" and config.decay_shape == "linear":
        left = 1 - done / decay
    else:
        left = 0.5 * (1 + math.cos(math.pi * done / decay))
    return config.final + (1 - config.final) * left
