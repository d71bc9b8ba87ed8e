"""Depth draws: a pure function of (seed, step, group), so that every rank, layout and resumed run agrees."""

from __future__ import annotations

from loopscale.depth.priors import Prior
from loopscale.randomness import uniform


def draw_depths(prior: Prior, seed: int, step: int, groups: int) -> tuple[int, ...]:
    """R of each depth group of optimizer step ``step``: the prior's quantile of one keyed uniform per group."""
    return tuple(prior.quantile(uniform(seed, "depth", step, group)) for group in range(groups))
