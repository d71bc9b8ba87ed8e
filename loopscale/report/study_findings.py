"""The sentences that a study's figures state, worked out from the numbers they show."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from loopscale.report.findings import SAME_SCALE, change, number
from loopscale.report.statistics import Estimate

SAME_LAW = 1e-3
"""Laws within this total variation of each other are called the same; what is cut from their tails is less."""
ROUNDING = 1e-9
"""An error of this share of its mean is floating point's."""
BLIND = 1e-6
"""A loss whose gradient has less of a radial part does not see the state's scale; that of random directions has some 1e-2."""
CLAMPS = {"rms": "held at the RMS of loop 1", "radial": "moved without radial part"}
"""What a clamp does to each token's state."""
STILL = 0.005
"""A mean or an entropy of a law that moves by less than this stays: two decimals show no more."""


def measured(value: Estimate, signed: bool = False) -> str:
    """Mean ± standard error, to two significant digits of the error; without one, the mean to four."""
    plus = "+" if signed else ""
    if value.error is None or value.error <= abs(value.mean) * ROUNDING:
        mean = f"{value.mean:{plus},.0f}" if abs(value.mean) >= 1000 else f"{value.mean:{plus}.4g}"
        return mean if value.error is None else f"{mean} ± 0"
    decimals = max(0, 1 - math.floor(math.log10(value.error)))
    if decimals > 6 and abs(value.mean) < 1e-3:
        return f"{value.mean:{plus}.2g} ± {value.error:.2g}"
    decimals = min(6, decimals)
    return f"{value.mean:{plus},.{decimals}f} ± {value.error:,.{decimals}f}"


def law_moved_finding(arm: str, first: Sequence[float], last: Sequence[float]) -> str:
    """What became of the likeliest depth."""
    before, after = (law.index(max(law)) + 1 for law in (first, last))
    if before != after:
        return f"{arm}: the likeliest depth moves from {before} (p = {max(first):.2f}) to {after} (p = {max(last):.2f})"
    if abs(max(last) - max(first)) < STILL:
        return f"{arm}: the likeliest depth stays {after}, at p = {max(last):.2f}; the law changes around it"
    verb = "rises" if max(last) > max(first) else "falls"
    return f"{arm}: the likeliest depth stays {after}; its probability {verb} from {max(first):.2f} to {max(last):.2f}"


def final_law_finding(entropies: Mapping[str, float]) -> str:
    """Which arm's law (entropies in nats) ended broadest and which narrowest."""
    broad, narrow = max(entropies, key=lambda arm: entropies[arm]), min(entropies, key=lambda arm: entropies[arm])
    if len(entropies) == 1:
        return f"{broad}'s law ends with an entropy of {entropies[broad]:.2f} nats"
    if entropies[broad] - entropies[narrow] < STILL:
        return f"The laws of all arms end as broad as each other, with an entropy of {entropies[broad]:.2f} nats"
    return (
        f"{broad}'s law ends broadest, with an entropy of {entropies[broad]:.2f} nats,"
        f" {narrow}'s narrowest, with {entropies[narrow]:.2f}"
    )


def law_course_finding(what: str, courses: Mapping[str, Mapping[int, Estimate]]) -> str:
    """Where ``what`` (mean or entropy) of the laws moved most; courses are by arm and step."""
    ends = {arm: (values[min(values)].mean, values[max(values)].mean) for arm, values in courses.items()}
    most = max(ends, key=lambda arm: abs(ends[arm][1] - ends[arm][0]))
    before, after = ends[most]
    if abs(after - before) < STILL:
        return f"The {what} of the law stays as it began{' in all arms' if len(ends) > 1 else ''}"
    verb = "rises" if after > before else "falls"
    whose = f"most in {most}, " if len(ends) > 1 else f"in {most} "
    return f"The {what} of the law {verb} {whose}from {before:.2f} to {after:.2f}"


def final_perplexity_finding(
    depth: int, perplexities: Mapping[str, Estimate], reference: str, differences: Mapping[str, Estimate]
) -> str:
    """Which arm has the lowest perplexity at ``depth``, and how far from the reference.

    Args:
        differences: In loss to the reference, paired by seed; by arm.
    """
    if not perplexities:
        return f"No finite held-out loss at depth {depth}"
    ranking = sorted(perplexities, key=lambda arm: perplexities[arm].mean)
    best = ranking[0]
    if len(ranking) == 1:
        return f"At depth {depth} {best} has perplexity {measured(perplexities[best])}"
    other = ranking[1] if best == reference or reference not in perplexities else reference
    start = (
        f"At depth {depth} {best} has the lowest perplexity, {measured(perplexities[best])},"
        f" against {measured(perplexities[other])} of {other}"
    )
    arm = other if best == reference else best
    if arm not in differences:
        return start
    return f"{start} ({arm} - {reference}: {measured(differences[arm], signed=True)} nats, paired by seed)"


def loss_course_finding(courses: Mapping[str, Mapping[int, Estimate]]) -> str:
    """Where the arms' held-out losses ended."""
    ended, last, broken = _to_the_end(courses)
    ends = {arm: values[last].mean for arm, values in ended.items()}
    high, low = _ends(ends)
    if len(ends) == 1:
        return f"Held-out loss ends at {ends[low]:.3f} nats after {last:,} steps{broken}"
    return f"Held-out loss ends between {ends[low]:.3f} nats ({low}) and {ends[high]:.3f} ({high}) after {last:,} steps{broken}"


def scale_finding(courses: Mapping[str, Mapping[int, Estimate]]) -> str:
    """In which arms the state's scale grew most and least over training."""
    ended, last, broken = _to_the_end(courses)
    first = min(step for values in ended.values() for step in values)
    growth = {arm: values[last].mean / values[min(values)].mean for arm, values in ended.items()}
    most, least = _ends(growth)
    start = f"From step {first:,} to {last:,} the state"
    if all(abs(ratio - 1) < SAME_SCALE for ratio in growth.values()):
        return f"{start} keeps its scale{f' in {_all(growth, len(courses))}' if len(growth) > 1 else ''}{broken}"
    other = f" and {change(growth[least])} in {least}" if len(growth) > 1 else ""
    return f"{start} {change(growth[most])} in {most}{other}{broken}"


def _to_the_end(courses: Mapping[str, Mapping[int, Estimate]]) -> tuple[dict[str, Mapping[int, Estimate]], int, str]:
    """The courses that reach the last step of all, that step, and words about those that break off before."""
    last = max(step for values in courses.values() for step in values)
    broken = [f"{arm} after step {max(values):,}" for arm, values in courses.items() if last not in values]
    words = f"; not a number: {', '.join(broken)}" if broken else ""
    return {arm: values for arm, values in courses.items() if last in values}, last, words


def _all(shown: Collection[str], arms: int) -> str:
    """All arms of a study, or as many as show what is told of."""
    return "all arms" if len(shown) == arms else f"all {len(shown)} arms that tell"


def final_norm_finding(norms: Mapping[str, Estimate], arms: int) -> str:
    """In which arm of ``arms`` states ended largest and in which smallest."""
    most, least = _ends({arm: found.mean for arm, found in norms.items()})
    if len(norms) == 1:
        return f"{most}'s states end with a norm of {measured(norms[most])}"
    ratio = norms[most].mean / norms[least].mean
    if ratio - 1 < SAME_SCALE:
        sizes = f"{measured(norms[least])} to {measured(norms[most])}"
        return f"The states of {_all(norms, arms)} end about as large, with norms of {sizes}"
    return (
        f"{most}'s states end largest, with a norm of {measured(norms[most])}:"
        f" {number(ratio)}× that of {least}'s, the smallest, {measured(norms[least])}"
    )


def gain_finding(gains: Mapping[str, Estimate], gaps: Mapping[str, Estimate]) -> str:
    """In which arm loops after the first gain most and in which least, as a difference of perplexity and as a ratio."""

    def told(arm: str) -> str:
        size = replace(gains[arm], mean=abs(gains[arm].mean))
        return f"in {arm}, by {measured(size)} ({number(gaps[arm].mean)}×)"

    most, least = _ends({arm: found.mean for arm, found in gains.items()})
    if gains[most].mean < 0:
        start, most, least = "Loops after the first raise perplexity", least, most
    else:
        start = "Loops after the first lower perplexity"
        if gains[least].mean < 0:
            return f"{start} most {told(most)}, and raise it most {told(least)}"
    return f"{start} {told(most)}" if len(gains) == 1 else f"{start} most {told(most)}, and least {told(least)}"


def radial_finding(fractions: Mapping[str, float], arms: int) -> str:
    """Which of ``arms`` arms' losses see the state's scale; radial parts of the gradient of the last loop's own loss, by arm."""
    most, least = _ends(fractions)
    if fractions[most] < BLIND:
        whose = f"in {_all(fractions, arms)}" if len(fractions) > 1 else f"in {most}"
        start = f"The last loop's loss is blind to the state's scale {whose}"
        return f"{start}: at most {fractions[most]:.1e} of its gradient is radial"
    if len(fractions) == 1:
        return f"The last loop's loss sees the state's scale in {most}: {fractions[most]:.1e} of its gradient is radial"
    parts = f"{fractions[most]:.1e} is radial in {most}, {fractions[least]:.1e} in {least}"
    start = f"Of the gradient of the last loop's loss {parts}"
    return f"{start}, which is blind to the state's scale" if fractions[least] < BLIND else start


def clamp_finding(changes: Mapping[str, Mapping[str, Estimate]]) -> str:
    """The largest change of the loss by a clamp; changes are by kind and arm."""
    flat = {(kind, arm): found for kind, own in changes.items() for arm, found in own.items()}
    kind, arm = max(flat, key=lambda each: abs(flat[each].mean))
    most = f"{measured(flat[kind, arm], signed=True)} nats with states {CLAMPS[kind]}"
    return f"Clamping the state's scale changes the loss most in {arm}: {most}"


def tail_finding(tails: Mapping[str, float], arms: int) -> str:
    """In which of ``arms`` arms norms spread widest; tails are 99th percentiles over medians."""
    if not tails:
        return "Norms of tokens"
    most, least = _ends(tails)
    start = f"Of {most}'s tokens the norm's 99th percentile is {number(tails[most])}× the median"
    if len(tails) == 1:
        return start
    if tails[most] / tails[least] - 1 < SAME_SCALE:
        return f"In {_all(tails, arms)} the 99th percentile of tokens' norms is about {number(tails[most])}× the median"
    return f"{start}, the widest spread; of {least}'s {number(tails[least])}×"


def frontier_finding(points: Mapping[str, tuple[float, float]], target: float) -> str:
    """What has the lowest perplexity, and what is the fastest of those that come within ``target`` times that.

    Args:
        points: Perplexity and tokens per second of each way to leave the loop.
    """
    best = min(points, key=lambda way: points[way][0])
    lowest, rate = points[best]
    near = [way for way, (value, _) in points.items() if value <= lowest * target]
    fastest = max(near, key=lambda way: points[way][1])
    start = f"The lowest perplexity is {number(lowest)}, of {best}"
    if fastest == best:
        return f"{start}; nothing within {target:g}× of it is faster"
    value, speed = points[fastest]
    return f"{start}; within {target:g}× of it the fastest is {fastest}, {number(speed / rate)}× as fast at {number(value)}"


def _ends(values: Mapping[str, float]) -> tuple[str, str]:
    """The arms of the largest and of the smallest value."""
    return max(values, key=lambda arm: values[arm]), min(values, key=lambda arm: values[arm])
