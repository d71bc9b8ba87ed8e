"""Laws of the number of visits R, as probabilities over 1..cap."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loopscale.config.tree import DepthConfig

_STEPS_PER_VISIT = 8
"""A moving mean moves by 1/8 at a time."""
_SPACING, _REACH, _LARGEST_LOG = 0.8, 9.0, 700.0
"""Quadrature: distance of points by the narrowest width, reach in sigma, and a log rate whose exponential is finite."""


@dataclass(frozen=True)
class Prior:
    """A categorical law: ``probabilities[i]`` is that of R = i + 1."""

    name: str
    probabilities: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(p * (i + 1) for i, p in enumerate(self.probabilities))

    @property
    def entropy(self) -> float:
        """In nats."""
        return -math.fsum(p * math.log(p) for p in self.probabilities if p > 0)

    def quantile(self, u: float) -> int:
        """The smallest R whose distribution function exceeds ``u`` in [0, 1)."""
        total = 0.0
        for i, p in enumerate(self.probabilities):
            total += p
            if u < total:
                return i + 1
        return max(i for i, p in enumerate(self.probabilities) if p > 0) + 1


@dataclass(frozen=True)
class DepthLaw:
    """The laws of a run whose mean may move with time alone, a :class:`~loopscale.depth.controller.DepthController`; each
    law is built once and kept here."""

    config: DepthConfig
    _built: dict[float, Prior] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, progress: float) -> Prior:
        """The law when ``progress``, 0 to 1, of all steps are done."""
        mean = mean_at(self.config, progress)
        if mean not in self._built:
            self._built[mean] = _law(self.config, mean)
        return self._built[mean]

    def update(self, groups: object) -> None:
        """A law that only time moves learns nothing from a step."""

    def figures(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: object) -> None:
        """Nothing was learned."""

    def digest(self) -> str:
        return hashlib.sha256(self.config.model_dump_json().encode()).hexdigest()


def make_prior(depth: DepthConfig, progress: float = 1.0) -> Prior:
    """The law a configuration asks for when ``progress``, 0 to 1, of all steps are done."""
    return _law(depth, mean_at(depth, progress))


def mean_at(depth: DepthConfig, progress: float) -> float:
    """The mean at ``progress``: linear from ``curriculum`` to ``mean`` over ``curriculum_share`` of the steps.

    Exact at both ends; between them a multiple of 1/8 away from the start, so that few distinct laws occur.
    """
    if depth.curriculum is None or progress >= depth.curriculum_share:
        return depth.mean
    way = depth.mean - depth.curriculum
    moved = round(_STEPS_PER_VISIT * abs(way) * progress / depth.curriculum_share) / _STEPS_PER_VISIT
    return depth.curriculum + math.copysign(min(moved, abs(way)), way)


def _law(depth: DepthConfig, mean: float) -> Prior:
    match depth.prior:
        case "fixed":
            return Prior("fixed", tuple(float(r == round(mean)) for r in range(1, round(mean) + 1)))
        case "poisson":
            return poisson(mean, depth.cap)
        case "lognormal_poisson":
            return lognormal_poisson(mean, depth.sigma, depth.cap)
        case "pln":
            return pln(mean, depth.sigma, depth.cap)
        case "learned":  # where it begins
            return Prior("learned", pln(mean, depth.sigma, depth.cap).probabilities)
        case "uniform":
            return uniform(mean, depth.cap)
        case "table":
            return table(depth.table or (), depth.cap)


def poisson(mean: float, cap: int) -> Prior:
    """R = min(cap, max(1, Poisson(``mean``))) (Parcae)."""
    chances = [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(cap + 1)]
    return Prior("poisson", _with_rest([chances[0] + chances[1], *chances[2:]][: cap - 1]))


def lognormal_poisson(mean: float, sigma: float, cap: int) -> Prior:
    """R = min(cap, 1 + Poisson(λ)), log λ ~ N(log ``mean`` − σ²/2, σ²): E[λ] = ``mean``, and that of R one more (Huginn)."""
    return Prior("lognormal_poisson", _lognormal_poisson(math.log(mean) - sigma**2 / 2, sigma, cap))


def pln(mean: float, sigma: float = 0.5, cap: int = 64) -> Prior:
    """R = min(cap, 1 + Poisson(λ)), log λ ~ N(μ, σ²), μ such that E[R] = ``mean`` (Paper B).

    μ by bisection on the capped mean.
    """
    low, high = math.log(1e-6), math.log(4.0 * cap) + 4.0 * sigma
    for _ in range(54):
        middle = (low + high) / 2
        if Prior("pln", _lognormal_poisson(middle, sigma, cap)).mean < mean:
            low = middle
        else:
            high = middle
    return Prior("pln", _lognormal_poisson((low + high) / 2, sigma, cap))


def uniform(mean: float, cap: int) -> Prior:
    """R = min(cap, U), U uniform over 1 to n = 2 ``mean`` − 1; between whole n, their mixture of that mean."""
    n = 2 * mean - 1
    whole, part = math.floor(n), n - math.floor(n)
    chances = [(1 - part) / whole + part / (whole + 1)] * whole + [part / (whole + 1)]
    return Prior("uniform", _capped(chances[:whole] if part == 0 else chances, cap))


def table(weights: Sequence[float], cap: int) -> Prior:
    """R = 1, 2, … with probabilities in the ratio of ``weights``, capped."""
    total = math.fsum(weights)
    if not total > 0:
        raise ValueError("a table of depths needs a positive probability")
    return Prior("table", _capped([w / total for w in weights], cap))


def _capped(probabilities: Sequence[float], cap: int) -> tuple[float, ...]:
    """``probabilities`` of R = 1, 2, … with the mass beyond ``cap`` on ``cap``."""
    return tuple(probabilities) if len(probabilities) <= cap else (*probabilities[: cap - 1], math.fsum(probabilities[cap - 1 :]))


def _with_rest(head: Sequence[float]) -> tuple[float, ...]:
    """Probabilities of R below the cap, and what they leave, on the cap."""
    return (*head, max(0.0, 1.0 - math.fsum(head)))


def _lognormal_poisson(mu: float, sigma: float, cap: int) -> tuple[float, ...]:
    """Law of min(cap, 1 + Poisson(λ)), log λ ~ N(mu, sigma²).

    Trapezoidal rule on log λ within 9 sigma: for so smooth an integrand the error falls off exponentially in the
    spacing, which follows the narrowest width, that of the Poisson factor at the cap. Measured below 1e-9.
    """
    spacing = _SPACING / math.sqrt(1.0 + sigma**2 * cap)
    reach = math.ceil(_REACH / spacing)
    points = [spacing * i for i in range(-reach, reach + 1)]
    weights = [spacing / math.sqrt(2.0 * math.pi) * math.exp(-x * x / 2) for x in points]
    logs = [min(mu + sigma * x, _LARGEST_LOG) for x in points]
    rates = [math.exp(log) for log in logs]
    nodes = list(zip(weights, logs, rates, strict=True))
    factorials = [math.lgamma(k + 1) for k in range(cap - 1)]
    return _with_rest([math.fsum(w * math.exp(k * log - rate - f) for w, log, rate in nodes) for k, f in enumerate(factorials)])
