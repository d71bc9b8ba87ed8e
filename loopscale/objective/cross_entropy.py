"""Cross entropy of a linear head without ever holding all logits.

N tokens, d width, V vocabulary. A chunk's logits [n, V] are turned into their own gradient in place as soon as they
exist, so the head costs its three matrix products (logits, state gradient, weight gradient) and nothing is
recomputed; the memory is one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target of a position that is not scored."""


@dataclass(frozen=True)
class VocabularyShare:
    """The rows of the head that one of several ranks holds: row i is token ``first`` + i, if that is below ``size``, else
    padding. ``reduce`` combines a tensor over the ranks, in place."""

    first: int
    size: int
    reduce: Callable[[Tensor, Literal["max", "sum"]], None]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, chunk: int, row_weights: Tensor | None,
        share: VocabularyShare | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        compute_weight = weight.to(states.dtype)
        losses = torch.empty(len(targets), dtype=torch.float32, device=states.device)
        d_states = torch.empty_like(states) if needs_states else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = (states[part] @ compute_weight.t()).float()
            scored = (targets[part] != IGNORED)[:, None]
            index = targets[part].clamp(min=0)[:, None]
            held = scored  # whether the target's logit is among these
            if share is not None:
                logits[:, max(share.size - share.first, 0) :] = float("-inf")
                index = index - share.first
                held = scored & (index >= 0) & (index < len(weight))
                index = index.clamp(0, len(weight) - 1)
            top = logits.amax(dim=-1, keepdim=True)
            target_logit = logits.gather(1, index)
            if share is not None:
                share.reduce(top, "max")
                target_logit = torch.where(held, target_logit, 0.0)
            exponentials = logits.sub_(top).exp_()
            total = exponentials.sum(dim=-1, keepdim=True)
            if share is not None:
                sums = torch.cat((total, target_logit))
                share.reduce(sums, "sum")
                total, target_logit = sums.chunk(2)
            losses[part] = ((total.log() + top - target_logit) * scored).squeeze(1)
            if needs_states or needs_weight:
                d_logits = exponentials.mul_(scored / total)
                d_logits.scatter_add_(1, index, -held.to(d_logits.dtype))
                if row_weights is not None:
                    d_logits.mul_(row_weights[part, None])
                d_logits = d_logits.to(states.dtype)
                if d_states is not None:
                    torch.mm(d_logits, compute_weight, out=d_states[part])
                if d_weight is not None:
                    _accumulate(d_weight, d_logits.t(), states[part], first=start == 0)
                del d_logits
            del logits, exponentials  # before the next chunk's are there
        ctx.save_for_backward(d_states, d_weight, losses if row_weights is not None else None)
        ctx.mark_non_differentiable(losses)
        return (losses if row_weights is None else losses * row_weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_weight, losses = ctx.saved_tensors
        d_states = None if d_states is None else d_states.mul_(d_sum)
        d_weight = None if d_weight is None else d_weight.mul_(d_sum)
        return d_states, d_weight, None, None, None if losses is None else losses * d_sum, None


def _accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``total`` (+)= left @ right, the sum in the type of ``total``."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


def linear_cross_entropy(
    states: Tensor, weight: Tensor, targets: Tensor, chunk: int, row_weights: Tensor | None = None,
    share: VocabularyShare | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ over scored tokens of row_weight · (−log softmax(weight · state)[target]), in nats, and each token's loss.

    ``states`` [N, d] in the compute type, ``weight`` [V, d] fp32 (cast to the compute type here, so that its gradient
    is fp32), ``targets`` [N] int64 with :data:`IGNORED` where not scored; at most ``chunk`` rows of logits exist at
    once. ``row_weights`` [N] may carry gradient; unset, they are 1. Returns the sum (fp32 scalar with gradient) and
    the losses [N] before weighting (without gradient, 0 where not scored). The backward may run once.

    With a ``share``, ``weight`` is what this rank has of the head; every rank gets the same sum and losses, and of the
    gradient by ``states`` the part that its rows send back.
    """
    total, losses = _LinearCrossEntropy.apply(states, weight, targets, chunk, row_weights, share)
    return total, losses
