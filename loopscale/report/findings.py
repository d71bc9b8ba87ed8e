"""The sentence that each figure states, worked out from the numbers it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

FLAT = 0.01
"""Perplexities within this share of each other are called flat."""
SAME_SCALE = 0.05
"""States whose scale differs by less than this share keep it."""


def number(value: float) -> str:
    """About three significant digits as people write them: 1,020, 231, 94.3, 4.61, 3.2e+08."""
    size = abs(value)
    if size >= 1e7 or size < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def count(value: float) -> str:
    """1.9M, 2.71M, 4.2B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999,600 is 1M, not 1000k
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def span(values: Collection[float], shown: Callable[[float], str] = count) -> str:
    """The value that all share, or the least and the largest."""
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"


def perplexity(nats: float) -> float:
    """exp(loss), of a loss in nats per token."""
    return math.exp(min(nats, 700.0))  # exp(710) overflows


def loss_finding(
    losses: Mapping[int, float], validation: Mapping[int, float], depth: str | None, baselines: Mapping[str, float]
) -> str:
    """Where training and validation loss (nats per token, by step) went, and which baselines the last one lies between."""
    if not losses:
        return "No finite loss has been logged"
    steps = list(losses)
    first, last = losses[steps[0]], losses[steps[-1]]
    if len(losses) == 1:
        training = f"Training loss is {number(first)} nats at step {steps[0]:,}, the only one logged"
    else:
        verb = "falls" if last < first else "rises"
        training = f"Training loss {verb} from {number(first)} to {number(last)} nats in {steps[-1]:,} steps"
    if not validation:
        return training
    final = validation[list(validation)[-1]]
    best = min(validation, key=lambda step: validation[step])
    rising = f", up from its best {number(validation[best])} at step {best:,}" if validation[best] < final * (1 - FLAT) else ""
    return f"{training}; validation at depth {depth} ends at {number(final)}{rising}{_standing(final, baselines)}"


def _standing(loss: float, baselines: Mapping[str, float]) -> str:
    """Where a loss lies among the baselines."""
    above = [name for name in sorted(baselines, key=lambda name: baselines[name]) if baselines[name] >= loss]
    below = [name for name in sorted(baselines, key=lambda name: -baselines[name]) if baselines[name] < loss]
    if above and below:
        return f", between {above[0]} and {below[0]}"
    return f", below {above[0]}" if above else f", above {below[0]}" if below else ""


def perplexity_finding(perplexities: Mapping[int, float]) -> str:
    """How perplexity changes with depth: where it stops falling, and what happens after."""
    if not perplexities:
        return "No evaluation yet"
    depths = sorted(perplexities)
    first, last = depths[0], depths[-1]
    if first == last:
        return f"Perplexity is {number(perplexities[first])} at depth {first}, the only depth evaluated"
    lowest = min(perplexities.values())
    # The shallowest depth that is as good as the best: more loops than that are not worth their time.
    enough = next(depth for depth in depths if perplexities[depth] <= lowest * (1 + FLAT))
    tail = [perplexities[depth] for depth in depths if depth >= enough]
    start = f"Perplexity is {number(perplexities[first])} at depth {first}"
    if enough > first:
        start = f"Perplexity falls from {number(perplexities[first])} at depth {first}"
        start += f" to {number(perplexities[enough])} at depth {enough}"
    if enough == last:
        return f"{start}, the deepest evaluated"
    if max(tail) <= lowest * (1 + FLAT):
        return f"{start} and is flat to depth {last}"
    if perplexities[last] > lowest * (1 + FLAT):
        return f"{start} and rises to {number(perplexities[last])} at depth {last}"
    return f"{start} and stays between {number(lowest)} and {number(max(tail))} to depth {last}"


def depth_finding(draws: Mapping[int, int], pmf: Sequence[float]) -> str:
    """Whether the drawn depths (counts by depth) have the mean that the prior's law (probability of 1, 2, …) gives."""
    count = sum(draws.values())
    if not count:
        return "No depths have been logged"
    mean = sum(depth * times for depth, times in draws.items()) / count
    if count == 1:
        start = f"The only depth logged is {mean:.0f}"
    elif len(draws) == 1:
        start = f"All {count:,} logged depths are {mean:.0f}"
    else:
        start = f"The {count:,} logged depths average {mean:.1f}"
    if not pmf:
        return start
    expected = sum(depth * share for depth, share in enumerate(pmf, 1))
    variance = sum((depth - expected) ** 2 * share for depth, share in enumerate(pmf, 1))
    # Three standard errors: a right sampler is called wrong once in 400 reports.
    agrees = abs(mean - expected) <= 3 * math.sqrt(variance / count) + 1e-9
    return f"{start}, {'in line with' if agrees else 'away from'} the prior's mean of {expected:.1f}"


def norm_finding(first: tuple[int, Sequence[float]], last: tuple[int, Sequence[float]]) -> str:
    """How the state's scale changes over loops and over training; each argument is a step and its scale by loop."""
    (early, before), (late, now) = first, last
    loops = len(now)
    if loops == 1:
        start = f"At step {late:,} the state was looped once"
    else:
        start = f"Over {loops} loops at step {late:,} the state {change(_ratio(now[-1], now[0]))}"
    if early == late:
        return start
    # At the same loop, else a deeper draw would look like a larger state.
    common = min(len(before), loops) - 1
    ratio = _ratio(now[common], before[common])
    if abs(ratio - 1) < SAME_SCALE:
        return f"{start}, and is as large as at step {early:,}"
    return f"{start}, and is {number(ratio)}× as large as at step {early:,}"


def change(ratio: float) -> str:
    """What a state whose scale became so many times as large did."""
    if abs(ratio - 1) < SAME_SCALE:
        return "keeps its scale"
    return f"grows {number(ratio)}×" if ratio > 1 else f"shrinks to {number(ratio)}×"


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.inf
