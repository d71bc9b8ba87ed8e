"""Norms of the state by loop, as sums and histograms: they add up over microbatches and ranks, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW, _HIGH, _BINS = -16.0, 32.0, 1536
"""Histogram of log2 of a norm: 32 bins an octave, so a quantile is right within 2.2%."""
_COARSE = 8
"""Of those bins one of the histogram that is told: four an octave."""

CONVERGED = 0.03
"""A token has converged where ‖h_r − h_{r−1}‖ / ‖h_r‖ is below this: the latent criterion of Huginn's adaptive exits."""


@dataclass(frozen=True)
class LoopNorms:
    """Per loop r = 1..R_max: L2 norm per token before any norm (mean, 99th percentile), the mean relative change
    ‖h_r − h_{r−1}‖ / ‖h_r‖, and the share of tokens that have converged by it (the first loop has neither). A sequence of
    per-sequence depth that has not begun stands still, and counts so."""

    mean: list[float]
    p99: list[float]
    change: list[float | None]
    converged: list[float | None]


@dataclass(frozen=True)
class NormSpread:
    """How norms spread over tokens, per loop r = 1..R_max: drifting norms have heavy tails, which a mean hides."""

    mean: list[float]
    median: list[float]
    """From the histogram, right within 2.2%; so is the 99th percentile."""
    p99: list[float]
    max: list[float]
    std: list[float]
    edges: list[float]
    """Of the histogram's bins: a quarter of an octave each, as far as tokens lie."""
    counts: list[list[int]]
    """Tokens per loop and bin, one bin fewer than edges."""


class NormMeter:
    """Collects norms through the executor's observer; :meth:`result` and :meth:`spread` add up over ranks."""

    def __init__(self, loops: int, device: torch.device):
        self._sums = torch.zeros(loops, 4, dtype=torch.float64, device=device)  # tokens, Σ norm, Σ change, converged
        self._squares, self._largest = torch.zeros(2, loops, dtype=torch.float64, device=device)
        self._counts = torch.zeros(loops, _BINS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(self, microbatch: int, visit: int, before: Tensor | None, after: Tensor) -> None:
        """States [S, B, d] before and after visit ``visit``; tokens whose norm is not finite are left out."""
        norms = torch.linalg.vector_norm(after.float(), dim=-1).flatten()
        finite = norms.isfinite()
        norms, row = norms[finite], self._sums[visit - 1]
        row[0] += len(norms)
        row[1] += norms.double().sum()
        self._squares[visit - 1] += norms.double().square().sum()
        if len(norms):
            self._largest[visit - 1].clamp_(min=norms.amax())
        if before is not None:
            moved = torch.linalg.vector_norm((after - before).float(), dim=-1).flatten()[finite]
            change = moved / norms.clamp(min=1e-30)
            row[2] += change.double().sum()
            row[3] += (change < CONVERGED).sum()
        bins = ((norms.clamp(min=1e-30).log2() - _LOW) * (_BINS / (_HIGH - _LOW))).clamp(0, _BINS - 1).long()
        self._counts[visit - 1] += torch.bincount(bins, minlength=_BINS)

    def result(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> LoopNorms:
        """The norms of all tokens that reached each loop; loops that none reached are left out. A collective."""
        packed = sum_over_ranks(torch.cat((self._sums, self._counts), dim=1)).cpu()
        reached = packed[packed[:, 0] > 0]
        tokens, sums = reached[:, 0], self._sums.shape[1]
        mean, change, converged = (reached[:, 1:sums] / tokens[:, None]).t().tolist()
        return LoopNorms(mean, _quantile(reached[:, sums:], 0.99), [None, *change[1:]], [None, *converged[1:]])

    def spread(self, sum_over_ranks: Callable[[Tensor], Tensor], max_over_ranks: Callable[[Tensor], Tensor]) -> NormSpread:
        """The spread over all tokens that reached each loop; loops that none reached are left out. A collective."""
        packed = sum_over_ranks(torch.cat((self._sums[:, :2], self._squares[:, None], self._counts), dim=1)).cpu()
        largest, there = max_over_ranks(self._largest.clone()).cpu(), packed[:, 0] > 0
        tokens, sums, squares = packed[there, :3].t()
        counts, mean = packed[there, 3:], sums / tokens
        deviation = (squares / tokens - mean.square()).clamp(min=0).sqrt()
        median, p99 = (  # the middle of a bin may lie beyond all that is in it
            [min(quantile, most) for quantile, most in zip(_quantile(counts, share), largest[there].tolist(), strict=True)]
            for share in (0.5, 0.99)
        )
        coarse = counts.unflatten(1, (-1, _COARSE)).sum(-1)
        filled = coarse.sum(0).nonzero().flatten().tolist() or [0]
        bins = range(filled[0], filled[-1] + 1)
        return NormSpread(
            mean.tolist(), median, p99, largest[there].tolist(), deviation.tolist(),
            [_edge(_COARSE * i) for i in (*bins, bins.stop)], coarse[:, bins.start : bins.stop].long().tolist(),
        )  # fmt: skip


def _quantile(counts: Tensor, share: float) -> list[float]:
    """Where ``share`` of the tokens of each row lie below, in the middle of a bin; ``counts`` [loops, bins]."""
    fraction = counts.cumsum(1) / counts.sum(1, keepdim=True)
    return [_edge(bin + 0.5) for bin in (fraction < share).sum(1).tolist()]


def _edge(bin: float) -> float:
    """The norm at which bin number ``bin`` begins."""
    return float(2.0 ** (_LOW + bin * ((_HIGH - _LOW) / _BINS)))
