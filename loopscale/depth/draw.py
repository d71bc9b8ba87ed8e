"""Depth draws: a pure function of (seed, step, group), so that every rank, layout and resumed run agrees."""

from __future__ import annotations

from typing import Literal

from loopscale.depth.priors import Prior
from loopscale.randomness import uniform

Scheme = Literal["independent", "antithetic", "stratified"]


def draw_depths(prior: Prior, seed: int, step: int, groups: int, scheme: Scheme = "independent") -> tuple[int, ...]:
    """R of each depth group of optimizer step ``step``: the prior's quantile of one keyed uniform per group."""
    return tuple(prior.quantile(u) for u in keyed_uniforms(seed, step, groups, scheme))


def keyed_uniforms(seed: int, step: int, groups: int, scheme: Scheme) -> list[float]:
    """A number in (0, 1) for each group, uniform by itself under every scheme. Antithetic: groups 2k and 2k + 1 have u and
    1 − u. Stratified: one number in each of ``groups`` equal intervals, which keyed numbers put in order."""
    drawn = [uniform(seed, "depth", step, group) for group in range(groups)]
    if scheme == "antithetic":
        return [1 - drawn[group - 1] if group % 2 else u for group, u in enumerate(drawn)]
    if scheme == "stratified":
        keys = [uniform(seed, "stratum", step, group) for group in range(groups)]
        stratum = {group: n for n, group in enumerate(sorted(range(groups), key=lambda group: keys[group]))}
        return [(stratum[group] + u) / groups for group, u in enumerate(drawn)]
    return drawn
