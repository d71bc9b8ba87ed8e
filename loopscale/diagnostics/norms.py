"""Norms of the state by loop, as sums and histograms: they add up over microbatches and ranks, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW, _HIGH, _BINS = -16.0, 32.0, 1536
"""Histogram of log2 of a norm: 32 bins an octave, so a quantile is right within 2.2%."""


@dataclass(frozen=True)
class LoopNorms:
    """Per loop r = 1..R_max: L2 norm per token before any norm (mean, 99th percentile), and mean
    ‖h_r − h_{r−1}‖ / ‖h_r‖ (the first loop has none)."""

    mean: list[float]
    p99: list[float]
    change: list[float | None]


class NormMeter:
    """Collects norms through the executor's observer; :meth:`result` adds up over ranks."""

    def __init__(self, loops: int, device: torch.device):
        self._sums = torch.zeros(loops, 3, dtype=torch.float64, device=device)  # tokens, Σ norm, Σ relative change
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
            row[2] += (moved / norms.clamp(min=1e-30)).double().sum()
        bins = ((norms.clamp(min=1e-30).log2() - _LOW) * (_BINS / (_HIGH - _LOW))).clamp(0, _BINS - 1).long()
        self._counts[visit - 1] += torch.bincount(bins, minlength=_BINS)

    def result(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> LoopNorms:
        """The norms of all tokens that reached each loop; loops that none reached are left out. A collective."""
        packed = sum_over_ranks(torch.cat((self._sums, self._counts), dim=1)).cpu()
        reached = packed[packed[:, 0] > 0]
        tokens, norms, changes = reached[:, 0], reached[:, 1], reached[:, 2]
        fraction = reached[:, 3:].cumsum(1) / tokens[:, None]
        bins = (fraction < 0.99).sum(1)
        p99 = torch.exp2(_LOW + (bins + 0.5) * ((_HIGH - _LOW) / _BINS))
        change = (changes / tokens).tolist()
        return LoopNorms((norms / tokens).tolist(), p99.tolist(), [None, *change[1:]])
