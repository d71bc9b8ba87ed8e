"""What the seeds of an arm say together: pure functions of numbers. A None among them is a value that was not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    error: float | None
    """Its standard error; None with one seed, which has none."""
    n: int
    """Seeds."""

    @property
    def rounded_error(self) -> float | None:
        return None if self.error is None else rounded(self.error, 3)


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean of n values, m = Σ x / n, and its standard error, s / √n with s² = Σ (x - m)² / (n - 1); None without a value."""
    finite = [value for value in values if value is not None]
    n = len(finite)
    if not n:
        return None
    mean = math.fsum(finite) / n
    if n == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / (n - 1))
    return Estimate(mean, deviation / math.sqrt(n), n)


def paired_difference(arm: Mapping[int, float | None], reference: Mapping[int, float | None]) -> Estimate | None:
    """The estimate of d = x - y over the seeds that have both, x of ``arm`` and y of ``reference``.

    What a seed does to both of them, as the order of the data, cancels in d: its standard error is that of the differences.
    """
    pairs = [(arm[seed], reference[seed]) for seed in arm if seed in reference]
    return estimate(x - y for x, y in pairs if x is not None and y is not None)


def mean_law(laws: Sequence[Sequence[float]]) -> list[float]:
    """The mean of laws of R = 1, 2, …, depth by depth; a law that ends earlier is 0 beyond its end."""
    return [math.fsum(shares) / len(laws) for shares in zip_longest(*laws, fillvalue=0.0)]


def total_variation(first: Sequence[float], second: Sequence[float]) -> float:
    """½ Σ |p - q|: the most by which two laws can differ about the probability of any set of depths."""
    return math.fsum(abs(p - q) for p, q in zip_longest(first, second, fillvalue=0.0)) / 2


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` (2 or more) of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def rounded(value: float, digits: int = 4) -> float:
    """The value to so many significant digits."""
    return float(f"{value:.{digits}g}")
