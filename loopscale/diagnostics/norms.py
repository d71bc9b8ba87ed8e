"""Norms of the state by loop, as sums and histograms: they add up over microbatches and ranks, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW, _HIGH, _BINS = -16.0, 32.0, 1536
"""Histogram of log2 of a norm: 32 bins an octave, so a quantile is right within 2.2%."""


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


class NormMeter:
    """Collects norms through the executor's observer; :meth:`result` adds up over ranks."""

    def __init__(self, loops: int, device: torch.device):
        self._sums = torch.zeros(loops, 4, dtype=torch.float64, device=device)  # tokens, Σ norm, Σ change, converged
        self._counts = torch.zeros(loops, _BINS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(self, microbatch: int, visit: int, before: Tensor | None, after: Tensor) -> None:
        """States [S, B, d] before and after visit ``visit``; tokens whose norm is not finite are left out."""
        norms = torch.linalg.vector_norm(after.float(), dim=-1).flatten()
        finite = norms.isfinite()
        norms, row = norms[finite], self._sums[visit - 1]
        row[0] += len(norms)
        row[1] += norms.double().sum()
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
        fraction = reached[:, sums:].cumsum(1) / tokens[:, None]
        bins = (fraction < 0.99).sum(1)
        p99 = torch.exp2(_LOW + (bins + 0.5) * ((_HIGH - _LOW) / _BINS))
        mean, change, converged = (reached[:, 1:sums] / tokens[:, None]).t().tolist()
        return LoopNorms(mean, p99.tolist(), [None, *change[1:]], [None, *converged[1:]])
