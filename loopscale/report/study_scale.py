"""What the diagnoses of an arm's runs say of the scale of their state, and what loops after the first gain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from loopscale.report.exits import Depth, Number
from loopscale.report.findings import perplexity
from loopscale.report.run import Entry, Run
from loopscale.report.study import Arm

FLOOR = 1e-12
"""Radial fractions are shown no lower."""

Size = Annotated[Number, Field(ge=0)]
Look = Callable[[Entry], float | None]
"""One value of a diagnosis."""
Values = dict[int, float | None]
"""Of an arm, by seed."""


class Norms(BaseModel):
    """By loop; None where it was not finite."""

    mean: list[Size | None]
    median: list[Size | None]
    p99: list[Size | None]
    edges: list[Annotated[Number, Field(gt=0)]]
    counts: list[list[Annotated[int, Field(strict=True, ge=0)]]]


class Diagnosis(BaseModel):
    """What the figures read of a diagnosis."""

    depth: Depth
    norms: Norms
    radial_fraction: list[Size | None] | None = None
    clamp: dict[str, Number | None] | None = None


def diagnoses(run: Run) -> dict[int, Entry]:
    """What a run's diagnoses found of its state's scale, by step; those that are made of something else are left out."""
    found = {}
    for record in run.records:
        with suppress(ValidationError):
            found[record["step"]] = Diagnosis.model_validate(record.get("scale")).model_dump()
    return found


def last(arm: Arm, look: Look) -> Values:
    """A value of the last diagnosis, of the seeds that have one."""
    told = {seed: list(diagnoses(run).values()) for seed, run in arm.runs.items()}
    return {seed: look(found[-1]) for seed, found in told.items() if found}


def growths(arm: Arm) -> Values:
    """The norm at the last diagnosis over that at the first, of the seeds that have two."""
    told = {seed: [norm(each) for each in diagnoses(run).values()] for seed, run in arm.runs.items()}
    return {
        seed: found[-1] / found[0] if found[0] and found[-1] is not None else None
        for seed, found in told.items()
        if len(found) > 1
    }


def gains(arm: Arm) -> Values:
    """Perplexity at depth 1 minus that at the evaluation depth K at the end, of the seeds that were validated at both."""
    return _from_depth_1(arm, lambda first, deep: perplexity(first) - perplexity(deep))


def gaps(arm: Arm) -> Values:
    """The ratio of the two, which is near 1 where the loop has frozen (Paper A)."""
    return _from_depth_1(arm, lambda first, deep: perplexity(first - deep))


def _from_depth_1(arm: Arm, of: Callable[[float, float], float]) -> Values:
    depth = arm.config.depth.evaluation_depth
    first, deep = arm.losses(1), arm.losses(depth)
    pairs = {seed: (first[seed], deep[seed]) for seed in arm.runs} if depth > 1 else {}
    return {seed: of(x, y) for seed, (x, y) in pairs.items() if x is not None and y is not None}


def norm(diagnosis: Entry) -> float | None:
    """Mean L2 norm of a token's state at the evaluation depth."""
    value: float | None = _deepest(diagnosis, "mean")
    return value or None


def tail(diagnosis: Entry) -> float | None:
    """The 99th percentile of tokens' norms over their median, both at the evaluation depth."""
    median, p99 = _deepest(diagnosis, "median"), _deepest(diagnosis, "p99")
    return p99 / median if median and p99 is not None else None


def radial_fraction(loop: int) -> Look:
    """Of the gradient of that loop's own loss."""

    def look(diagnosis: Entry) -> float | None:
        fraction = _at(diagnosis.get("radial_fraction"), loop)
        return None if fraction is None else max(fraction, FLOOR)

    return look


def last_radial_fraction(diagnosis: Entry) -> float | None:
    return radial_fraction(diagnosis["depth"])(diagnosis)


def clamp_change(kind: str) -> Look:
    """What a clamp changes the loss by, nats per token."""
    return lambda diagnosis: (diagnosis.get("clamp") or {}).get(kind)


def histogram(arm: Arm) -> dict[tuple[float, float], int]:
    """Tokens by the bin that their norm at the evaluation depth lies in, over the last diagnoses of all seeds. The bins of all
    runs are of one grid."""
    counts: dict[tuple[float, float], int] = {}
    for run in arm.runs.values():
        for diagnosis in list(diagnoses(run).values())[-1:]:
            edges = diagnosis["norms"]["edges"]
            for low, high, tokens in zip(edges, edges[1:], _deepest(diagnosis, "counts") or (), strict=False):
                counts[low, high] = counts.get((low, high), 0) + tokens
    bins = sorted(counts)
    filled = [index for index, each in enumerate(bins) if counts[each]]
    return {each: counts[each] for each in bins[filled[0] : filled[-1] + 1]} if filled else {}


def tokens_seen(diagnosis: Entry) -> int:
    """That were diagnosed and had a finite state."""
    return sum(_deepest(diagnosis, "counts") or ())


def _deepest(diagnosis: Entry, what: str) -> Any:
    """Of the norms at the evaluation depth."""
    return _at(diagnosis["norms"][what], diagnosis["depth"])


def _at(by_loop: list[Any] | None, loop: int) -> Any:
    """A loop that no finite state reached is not in the list."""
    return by_loop[loop - 1] if by_loop and len(by_loop) >= loop else None
