"""Laws of the number of visits R, as probabilities over 1..cap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loopscale.config.tree import DepthConfig

_NODES = 64


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


def make_prior(depth: DepthConfig) -> Prior:
    """The law a configuration asks for."""
    if depth.prior == "fixed":
        return Prior("fixed", tuple(float(i + 1 == depth.mean) for i in range(int(depth.mean))))
    return pln(depth.mean, depth.sigma, depth.cap)


def pln(mean: float, sigma: float = 0.5, cap: int = 64) -> Prior:
    """Poisson with a log-normal rate: R = min(cap, 1 + Poisson(λ)), log λ ~ N(μ, σ²), μ such that E[R] = ``mean``.

    μ by bisection on the capped mean; the integral over the rate by 64-point Gauss-Hermite quadrature (Paper B's
    released code; ``methods.md`` §2.2).
    """
    low, high = math.log(1e-6), math.log(4.0 * cap)
    for _ in range(80):
        middle = (low + high) / 2
        if Prior("pln", _pln_probabilities(middle, sigma, cap)).mean < mean:
            low = middle
        else:
            high = middle
    return Prior("pln", _pln_probabilities((low + high) / 2, sigma, cap))


def _pln_probabilities(mu: float, sigma: float, cap: int) -> tuple[float, ...]:
    rates, weights = zip(*_log_normal_nodes(mu, sigma), strict=True)
    head = [
        math.fsum(w * math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) for rate, w in zip(rates, weights, strict=True))
        for k in range(cap - 1)
    ]
    return (*head, max(0.0, 1.0 - math.fsum(head)))


def _log_normal_nodes(mu: float, sigma: float) -> Sequence[tuple[float, float]]:
    """Rates and weights with which Σ w f(λ) = E[f(λ)] for log λ ~ N(mu, sigma²)."""
    from numpy.polynomial.hermite_e import hermegauss

    nodes, weights = hermegauss(_NODES)
    norm = math.sqrt(2.0 * math.pi)
    return [(math.exp(mu + sigma * float(x)), float(w) / norm) for x, w in zip(nodes, weights, strict=True)]
