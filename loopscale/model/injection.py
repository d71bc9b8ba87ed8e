"""How the prelude's output e enters every visit. h state, e input, both [S, B, d].

An injection has two halves: ``source``, computed once per microbatch from e, and the call, made at every visit. Both
run in fp32. ``weights`` names its parameters. A new one is a class with these three and a line in
``config/registry.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from loopscale.config.registry import INJECTIONS, find
from loopscale.config.tree import ModelConfig
from loopscale.model.norm import rms_norm
from loopscale.model.parameters import Init, PartWeight, norm_gain


class Injection(nn.Module, ABC):
    """What every injection is. Parameters are attributes under the names that ``weights`` gives."""

    def __init__(self, model: ModelConfig):
        super().__init__()

    @classmethod
    def weights(cls, model: ModelConfig) -> Sequence[PartWeight]:
        """Name, shape, first value and kind of each parameter."""
        return ()

    @abstractmethod
    def source(self, e: Tensor) -> Tensor:
        """What the visits need of e."""

    @abstractmethod
    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        """The state as the core takes it."""


class AddInjection(Injection):
    """h + e."""

    def source(self, e: Tensor) -> Tensor:
        return e

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        return h + source


class LinearInjection(Injection):
    """W [h; e] (+ bias), the state's columns first (Huginn). The half of the product that e enters is the source."""

    def __init__(self, model: ModelConfig):
        super().__init__(model)
        self.weight = nn.Parameter(torch.empty(model.hidden_size, 2 * model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.hidden_size)) if model.inject_bias else None

    @classmethod
    def weights(cls, model: ModelConfig) -> Sequence[PartWeight]:
        d = model.hidden_size
        bias = [PartWeight("bias", (d,), "zeros", "bias")] if model.inject_bias else []
        return [PartWeight("weight", (d, 2 * d), "linear", "injection"), *bias]

    def source(self, e: Tensor) -> Tensor:
        return F.linear(e, self.weight[:, e.shape[-1] :], self.bias)

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        return F.linear(h, self.weight[:, : h.shape[-1]]) + source


class DiagonalInjection(Injection):
    """a ⊙ h + q with q = Δ ⊙ (W e), Δ = softplus(dt_bias), a = exp(−Δ ⊙ exp(A_log)) per channel (Paper B)."""

    first_decay: Init = "decay"

    def __init__(self, model: ModelConfig):
        super().__init__(model)
        width = model.hidden_size
        self.A_log = nn.Parameter(torch.empty(width))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width, width))

    @classmethod
    def weights(cls, model: ModelConfig) -> Sequence[PartWeight]:
        d = model.hidden_size
        return [
            PartWeight("A_log", (d,), "zeros", "injection"),
            PartWeight("dt_bias", (d,), cls.first_decay, "injection"),
            PartWeight("weight", (d, d), "identity", "injection"),
        ]

    def source(self, e: Tensor) -> Tensor:
        return F.softplus(self.dt_bias) * F.linear(e, self.weight)

    def decay(self) -> Tensor:
        """a, [d]."""
        return torch.exp(-F.softplus(self.dt_bias) * self.A_log.exp())

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        return torch.addcmul(source, self.decay(), h)


class ParcaeInjection(DiagonalInjection):
    """As diagonal, on RMSNorm(e), and carrying 1/√5 of the state at first."""

    first_decay: Init = "decay_half_log_five"

    def __init__(self, model: ModelConfig):
        super().__init__(model)
        self.norm = nn.Parameter(torch.empty(model.hidden_size))
        self._eps, self._centered = model.norm_eps, model.norm_centered

    @classmethod
    def weights(cls, model: ModelConfig) -> Sequence[PartWeight]:
        return [*super().weights(model), PartWeight("norm", (model.hidden_size,), norm_gain(model), "norm")]

    def source(self, e: Tensor) -> Tensor:
        return super().source(rms_norm(e, 1 + self.norm if self._centered else self.norm, self._eps))


class OrthoInjection(DiagonalInjection):
    """v − (⟨v, q⟩ / (‖q‖² + ε)) q + q with v = a ⊙ h (Paper B's code); ε = 1e-6, the products run over all of d."""

    EPSILON = 1e-6
    first_decay: Init = "decay_half_log_five"

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        output: Tensor = _Ortho.apply(h, self.decay(), source, self.EPSILON)
        return output


class _Ortho(torch.autograd.Function):
    """v + c q, c = 1 − s / n, s = ⟨v, q⟩, n = ‖q‖² + ε, v = a ⊙ h, in some half of the passes over memory that autograd takes: a
    visit of a narrow model would feel them. With g the gradient of the output and t = ⟨g, q⟩

        ∂v = g − (t / n) q,   ∂h = a ⊙ ∂v,   ∂a = Σ ∂v ⊙ h,   ∂q = c g − (t / n) v + (2 t s / n²) q.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, a: Tensor, q: Tensor, epsilon: float) -> Tensor:
        v = a * h
        n = torch.linalg.vecdot(q, q).add_(epsilon)
        share = torch.linalg.vecdot(v, q).div_(n)  # s / n
        ctx.save_for_backward(h, a, q, n, share)
        return v.addcmul_((1 - share).unsqueeze(-1), q)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        h, a, q, n, share = ctx.saved_tensors  # type: ignore[attr-defined]
        along = torch.linalg.vecdot(g, q).div_(n)  # t / n
        by_v = torch.addcmul(g, along.unsqueeze(-1), q, value=-1)
        by_a = (by_v * h).flatten(0, -2).sum(0)
        by_q = torch.addcmul((1 - share).unsqueeze(-1) * g, along.unsqueeze(-1), a * h, value=-1)
        by_q.addcmul_((2 * along * share).unsqueeze(-1), q)
        return by_v.mul_(a), by_a, by_q, None


def make_injection(model: ModelConfig) -> Injection | None:
    """The injection a configuration asks for; None for ``inject: none``."""
    return None if model.inject == "none" else find(INJECTIONS[model.inject])(model)
