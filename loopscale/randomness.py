"""Counter-based random numbers: a value depends on what it is for, never on when or where it is drawn.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a 128-bit counter and a
64-bit key to 128 random bits. The key is a digest of (seed, purpose); the counter holds step, global sample,
position and channel. So a tensor-parallel slice, another microbatch size or a resumed run draws the same values.

The ten rounds are written once for Python integers (depth draws need no torch) and int64 tensors alike: products
wrap modulo 2**64, and the masks below keep the 32 bits that are meant.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Any, Any, Any, Any]
"""Four 32-bit words, as Python integers or as int64 tensors of one shape."""


def stream_key(seed: int, purpose: str) -> tuple[int, int]:
    """The Philox key of one purpose ("depth", "state", a parameter's name) under one seed."""
    digest = hashlib.sha256(f"{seed}\0{purpose}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of ``counter`` under ``key``; words are 0 <= w < 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, purpose: str, *counter: int) -> float:
    """One float in (0, 1), 52 bits fine, keyed by (seed, purpose) and up to four counters below 2**32."""
    words: list[int] = [*counter, 0, 0, 0, 0][:4]
    low, high, _, _ = philox((words[0], words[1], words[2], words[3]), stream_key(seed, purpose))
    return ((high << 20 | low >> 12) + 0.5) / 2**52


def uniforms(key: tuple[int, int], c1: torch.Tensor, c2: torch.Tensor, c3: int, width: int) -> torch.Tensor:
    """Uniform fp32 values in (0, 1] of shape ``[*broadcast(c1, c2), width]``.

    ``c1`` and ``c2`` are int64 tensors that broadcast together (position and global sample, say) and ``c3`` is one
    integer (the step); the channel, in blocks of four, is the first counter word.
    """
    import torch

    blocks = torch.arange((width + 3) // 4, dtype=torch.int64, device=c1.device)
    c1, c2 = torch.broadcast_tensors(c1, c2)
    shape = (*c1.shape, len(blocks))
    words = philox(
        (blocks.expand(shape), c1[..., None].expand(shape), c2[..., None].expand(shape), torch.full_like(blocks, c3)), key
    )
    return torch.stack([(w.to(torch.float32) + 0.5) * 2.0**-32 for w in words], dim=-1).flatten(-2)[..., :width]


def normals(key: tuple[int, int], c1: torch.Tensor, c2: torch.Tensor, c3: int, width: int) -> torch.Tensor:
    """Standard normal fp32 values, counters as for :func:`uniforms` (Box-Muller on neighbouring channels)."""
    import torch

    pairs = uniforms(key, c1, c2, c3, width + width % 2).unflatten(-1, (-1, 2))
    radius, angle = torch.sqrt(-2.0 * torch.log(pairs[..., 0])), 2.0 * torch.pi * pairs[..., 1]
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(-2)[..., :width]


def truncated_normals(key: tuple[int, int], c1: torch.Tensor, c2: torch.Tensor, c3: int, width: int, cut: float) -> torch.Tensor:
    """Normal fp32 values conditioned on lying within ``cut`` standard deviations, by the inverse distribution."""
    import torch

    inside = math.erf(cut / math.sqrt(2.0))
    return math.sqrt(2.0) * torch.erfinv((2.0 * uniforms(key, c1, c2, c3, width) - 1.0) * inside)
