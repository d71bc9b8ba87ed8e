"""From the coda's output to what the head multiplies. h [S, B, d].

``weights`` names a readout's parameters. A new one is a class like these and a line in ``config/registry.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loopscale.config.registry import READOUTS, find
from loopscale.config.tree import ModelConfig
from loopscale.model.norm import rms_norm
from loopscale.model.parameters import PartWeight, norm_gain


class RawReadout(nn.Module):
    """h."""

    def __init__(self, model: ModelConfig):
        super().__init__()

    @staticmethod
    def weights(model: ModelConfig) -> Sequence[PartWeight]:
        return ()

    def forward(self, h: Tensor, final: bool) -> Tensor:
        return h


class NormReadout(nn.Module):
    """RMSNorm, one for all visits."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(model.hidden_size))
        self._eps, self._centered = model.norm_eps, model.norm_centered

    @staticmethod
    def weights(model: ModelConfig) -> Sequence[PartWeight]:
        return [PartWeight("norm", (model.hidden_size,), norm_gain(model), "norm")]

    def forward(self, h: Tensor, final: bool = True) -> Tensor:
        return rms_norm(h, 1 + self.norm if self._centered else self.norm, self._eps)


class FinalOnlyReadout(NormReadout):
    """RMSNorm after the last visit, nothing before it."""

    def forward(self, h: Tensor, final: bool = True) -> Tensor:
        return super().forward(h) if final else h


class AlphaReadout(nn.Module):
    """γ u with s = RMS(h), u = h / s, γ = s_ref^(1−α) s^α, α = sigmoid(alpha), s_ref = exp(log_scale), both learned.

    α = 0 hides the scale of the state, α = 1 is raw (Paper A's released code).
    """

    SMALLEST = 1e-6

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.log_scale = nn.Parameter(torch.empty(1))

    @staticmethod
    def weights(model: ModelConfig) -> Sequence[PartWeight]:
        return [PartWeight("alpha", (1,), "zeros", "scalar"), PartWeight("log_scale", (1,), "zeros", "scalar")]

    def forward(self, h: Tensor, final: bool) -> Tensor:
        scale = h.square().mean(-1, keepdim=True).sqrt().clamp(min=self.SMALLEST)
        alpha = torch.sigmoid(self.alpha)
        return ((1 - alpha) * self.log_scale + alpha * scale.log()).exp() * (h / scale)


def make_readout(model: ModelConfig) -> nn.Module:
    """The readout a configuration asks for."""
    return find(READOUTS[model.readout])(model)
