"""Learning rate by step."""

from __future__ import annotations

import math

from loopscale.config.tree import OptimizerConfig

_FIRST = 1e-4
"""Where warm-up begins, as a share of the peak (Paper B)."""


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of the update that follows ``step`` completed ones, 0 <= step < steps.

    Linear warm-up from 1e-4 of the peak; then flat and a cosine to ``final`` over the last ``decay_share`` (wsd), one
    cosine to ``final`` (cosine), or flat (constant).
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (_FIRST + (1 - _FIRST) * (step + 1) / warmup)
    if config.schedule == "constant":
        return config.lr
    decay = round(config.decay_share * steps) if config.schedule == "wsd" else steps - warmup
    done = step + 1 - (steps - decay)
    if done <= 0:
        return config.lr
    return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done / decay)))
