"""A digest of a tensor's elements that does not depend on how the tensor is cut: digests of its pieces add up to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK, GPU_CHUNK = (1 << 15) - 1, 1 << 22
"""Elements that are whole numbers at once, 8 bytes each. On a CPU they stay in a core's cache, and are too few for torch to
divide them over threads, which would wait for each other wherever the machine does something else too."""
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687  # odd, of SplitMix64: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@torch.no_grad()
def element_digest(piece: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Sum over the elements of ``piece`` of (bits as a whole number) × (odd number of its global row) × (that of its global
    column), mod 2⁶⁴; a tensor of one axis is a row, and has no number for it.

    ``piece`` (fp32, one or two axes, on any device) lies at ``offsets`` in a tensor of ``shape``. Returns an int64 scalar on
    the piece's device, without waiting for it; sums over pieces wrap as they should. A change of one element always shows,
    any other but by a chance of 2⁻²⁷ at most.
    """
    chunk = CHUNK if piece.device.type == "cpu" else GPU_CHUNK
    rows = piece.unsqueeze(0) if piece.dim() == 1 else piece
    (height, width), total = rows.shape, torch.zeros((), dtype=torch.int64, device=piece.device)
    of_row = torch.empty(height, dtype=torch.int64, device=piece.device)
    for left in range(0, width, chunk):
        right = min(left + chunk, width)
        columns, step = _odd(offsets[-1] + left, right - left, 0, piece.device), max(1, chunk // width)
        for top in range(0, height, step):
            box = rows[top : top + step, left:right].view(torch.int32).long().mul_(columns)
            torch.sum(box, 1, out=of_row[top : top + step])
        total += (of_row if len(shape) == 1 else of_row.mul_(_odd(offsets[0], height, 1, piece.device))).sum()
    return total


def _odd(first: int, count: int, axis: int, device: torch.device) -> Tensor:
    """A pseudo-random odd number for each of ``count`` indices of an axis: neighbours share no pattern by which errors could
    cancel, and a row has another one than the column of its index."""
    number = torch.arange(2 * first + axis, 2 * (first + count) + axis, 2, device=device).mul_(_FIRST)
    number ^= number >> 32
    number.mul_(_SECOND)
    number ^= number >> 29
    return number.bitwise_or_(1)
