"""What the state passes on its way from one visit to the next. h [S, B, d]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from loopscale.config.tree import ModelConfig
from loopscale.model.norm import RMSNorm, rms_norm


class NormBetween(nn.Module):
    """RMSNorm with a gain of its own: removes the scale from the loop (Paper A's inter-loop norm)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(None, model.hidden_size, model.norm_eps, model.norm_centered)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Damping(nn.Module):
    """sigmoid(a) · h with one learned a, 2 at the start (Paper A's spectral damping)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.damping = nn.Parameter(torch.empty(1))

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.damping) * h


class UnitNorm(nn.Module):
    """RMSNorm without a gain; what is decoded passes it too (Paper B's code, after every recurrence of Huginn's injection)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.eps = model.norm_eps

    def forward(self, h: Tensor) -> Tensor:
        return rms_norm(h, torch.ones(h.shape[-1], device=h.device), self.eps)


BETWEEN: dict[str, Callable[[ModelConfig], nn.Module]] = {"rmsnorm": NormBetween, "damping": Damping, "unit": UnitNorm}
"""``none`` passes the state as it is, ``shared`` uses the readout's norm."""
