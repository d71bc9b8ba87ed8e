"""RMSNorm, computed in fp32 whatever the compute type."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _CpuRmsNorm(torch.autograd.Function):
    """y = x / rms(x) · gain. torch composes it of eight passes on a CPU; this takes a third of their time, and keeps
    its input, which the residual connection keeps anyway, rather than a copy. Row and column sums run as products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, gain)
        return (x * inverse).mul_(gain)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        """dx = inverse · (dy ⊙ gain − x · inverse² · ⟨dy ⊙ gain, x⟩ / d)."""
        x, inverse, gain = ctx.saved_tensors
        products = (d_y * x).flatten(0, -2)
        d_gain = torch.mv(products.t(), inverse.flatten())
        along = torch.mv(products, gain).view_as(inverse).mul_(inverse).mul_(inverse).div_(-x.shape[-1])
        return (d_y * gain).addcmul_(x, along).mul_(inverse), d_gain, None


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · gain over the last axis; at least fp32 inside, the type of ``x`` outside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = _CpuRmsNorm.apply(wide, gain, eps) if x.device.type == "cpu" else F.rms_norm(wide, gain.shape, gain, eps)
    return norm.to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with a learned gain w, or 1 + w when ``centered``; built by Megatron's layer spec."""

    def __init__(self, config: object, hidden_size: int, eps: float, centered: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps, self.centered = eps, centered

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1 + self.weight if self.centered else self.weight, self.eps)


HEAD_EPS = torch.finfo(torch.float32).eps
"""Of the norm of a head, which Parcae's code leaves to torch's default."""


class HeadNorm(nn.Module):
    """RMSNorm without a gain, over the channels of a head; built by Megatron's layer spec, with the ``eps`` of the others."""

    def __init__(self, config: object, hidden_size: int, eps: float):
        super().__init__()
        self.gain: Tensor
        self.register_buffer("gain", torch.ones(hidden_size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain, HEAD_EPS)
