"""The exit gate: a distribution over visits from one probability per token and visit. T visits, N tokens.

Ouro (arXiv 2510.25741); Paper A's adaptive loss is stage I on the state as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHARPNESS, THRESHOLD = 50.0, 0.005
"""Stage II: how steeply, and from which gain in nats, continuing is worth it."""


def exit_log_probabilities(gate: Tensor) -> Tensor:
    """log p_t of the gate's logits [T, N]: p_t = λ_t Π_{j<t} (1 − λ_j) with λ = sigmoid; the last takes what is left."""
    stay = F.logsigmoid(-gate[:-1]).cumsum(0)
    reach = torch.cat((torch.zeros_like(gate[:1]), stay))
    leave = torch.cat((F.logsigmoid(gate[:-1]), torch.zeros_like(gate[:1])))
    return reach + leave


def entropy(log_p: Tensor) -> Tensor:
    """−Σ_t p_t log p_t in nats, [N]."""
    return -(log_p.exp() * log_p).sum(0)


def continue_loss(gate: Tensor, losses: Tensor) -> Tensor:
    """Stage II per token, [N]: (1/T) Σ_{t≥2} BCE(1 − λ_t, w_t), w_t = sigmoid(50 (I_t − 0.005)), I_t = max(0, L_{t−1} − L_t).

    ``gate`` logits and ``losses`` (nats, without gradient), both [T, N].
    """
    gain = (losses[:-1] - losses[1:]).clamp(min=0)
    target = torch.sigmoid(SHARPNESS * (gain - THRESHOLD))
    return F.binary_cross_entropy_with_logits(-gate[1:], target, reduction="none").sum(0) / len(gate)
