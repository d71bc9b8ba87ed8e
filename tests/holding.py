"""Parameters as a rank holds them, and the global weights: one out of the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from loopscale.model.weights import Box, Holder, padded_rows


def spans(box: Box) -> tuple[slice, ...]:
    """Where the box lies in its weight."""
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def split(holder: Holder, shares: Sequence[Tensor]) -> dict[str, Tensor]:
    """The global weights out of what each tensor-parallel rank holds of the parameter."""
    weights = {w.name: torch.zeros(w.shape, dtype=shares[0].dtype) for w in holder.weights}
    for rank, share in enumerate(shares):
        for box, here in holder.views(share, rank, len(shares)):
            weights[box.weight.name][spans(box)] = here
    return weights


def join(holder: Holder, weights: Mapping[str, Tensor], rank: int = 0, size: int = 1) -> Tensor:
    """What rank ``rank`` of ``size`` holds of global weights."""
    rows = sum(padded_rows(w.shape[0], size) if holder.padded else w.shape[0] for w in holder.weights)
    shape = [rows, *holder.weights[0].shape[1:]]
    if holder.tensor_axis is not None:
        shape[holder.tensor_axis] //= size
    held = torch.zeros(shape, dtype=next(iter(weights.values())).dtype)
    for box, here in holder.views(held, rank, size):
        here.copy_(weights[box.weight.name][spans(box)])
    return held


def gather_shares(share: Tensor) -> list[Tensor]:
    """The shares of all ranks that share this rank's layers, in their order."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    shares = [torch.empty_like(share) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, share.contiguous(), group=group)
    return shares


def elements(box: Box) -> int:
    return math.prod(box.sizes)
