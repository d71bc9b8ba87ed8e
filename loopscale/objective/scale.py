"""Losses that see the scale of the state, which cross entropy behind a norm does not (Paper A).

T visits, S positions, B sequences, d width. Both are per sequence, so that they do not depend on how a batch is cut.
"""

from __future__ import annotations

from torch import Tensor


def mean_squares(states: Tensor, active: Tensor, positions: int) -> Tensor:
    """Mean over visits, positions and channels of h², [B]; ``states`` [T, S, B, d], ``active`` [T, B] 0 or 1.

    Of ``positions`` in all those in ``states`` count: shares of the positions add up.
    """
    squares = states.square().sum(dim=(1, 3)) / (positions * states.shape[-1])
    return (squares * active).sum(0) / active.sum(0)


def anchor(mean_squares: Tensor, target: float) -> Tensor:
    """(sqrt(mean square) − target)², [B]."""
    return (mean_squares.sqrt() - target).square()
