"""A digest of a tensor's elements that does not depend on how the tensor is cut: digests of its pieces add up to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK, GPU_CHUNK = 1 << 16, 1 << 22
"""Elements whose multipliers exist at once, 8 bytes each: on a CPU they stay in a core's cache."""
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687  # odd, of SplitMix64: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@torch.no_grad()
def element_digest(piece: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Sum over the elements of ``piece`` of (bits as a whole number) × (odd number drawn from the global index), mod 2⁶⁴.

    ``piece`` (fp32, one or two axes, on any device) lies at ``offsets`` in a tensor of ``shape``; an element's global index is
    its place in that tensor, row by row. Returns an int64 scalar on the piece's device, without waiting for it; sums over
    pieces wrap as they should. A change of one element always shows, any other but by a chance of 2⁻³² at most.
    """
    chunk = CHUNK if piece.device.type == "cpu" else GPU_CHUNK
    rows = piece.unsqueeze(0) if piece.dim() == 1 else piece
    first_row, first_column = (0, *offsets)[-2:]
    height, width = rows.shape
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for top in range(0, height, step := max(1, chunk // max(width, 1))):
        for left in range(0, width, chunk):
            box = rows[top : top + step, left : left + chunk].view(torch.int32)
            corner = (first_row + top) * shape[-1] + first_column + left
            down = torch.arange(box.shape[0], device=piece.device) * shape[-1] + corner
            multipliers = _odd(down[:, None] + torch.arange(box.shape[1], device=piece.device))
            total += multipliers.mul_(box).sum()
    return total


def _odd(index: Tensor) -> Tensor:
    """Pseudo-random odd numbers, in place: neighbours share no pattern by which errors could cancel."""
    index.mul_(_FIRST)
    index ^= index >> 32
    index.mul_(_SECOND)
    index ^= index >> 29
    return index.bitwise_or_(1)
