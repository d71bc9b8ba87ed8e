"""How the prelude's output e enters every visit. h state, e input, both [S, B, d].

An injection has two halves: ``source``, computed once per microbatch from e, and the call, made at every visit. Both
run in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscale.config.tree import ModelConfig


class AddInjection(nn.Module):
    """h + e."""

    def source(self, e: Tensor) -> Tensor:
        return e

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        return h + source


class OrthoInjection(nn.Module):
    """v − (⟨v, q⟩ / (‖q‖² + ε)) q + q with v = a ⊙ h and q = Δ ⊙ (W e) (Paper B's code; ``methods.md`` §2.6).

    Δ = softplus(dt_bias), a = exp(−Δ ⊙ exp(A_log)), per channel; ε = 1e-6; the products run over all of d.
    """

    EPSILON = 1e-6

    def __init__(self, width: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(width))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width, width))

    def source(self, e: Tensor) -> Tensor:
        return F.softplus(self.dt_bias) * F.linear(e, self.weight)

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        v = torch.exp(-F.softplus(self.dt_bias) * self.A_log.exp()) * h
        along = torch.linalg.vecdot(v, source) / (torch.linalg.vecdot(source, source) + self.EPSILON)
        return v + (1 - along).unsqueeze(-1) * source


def make_injection(model: ModelConfig) -> AddInjection | OrthoInjection | None:
    """The injection a configuration asks for; None for ``inject: none``."""
    match model.inject:
        case "none":
            return None
        case "add":
            return AddInjection()
        case "ortho":
            return OrthoInjection(model.hidden_size)
