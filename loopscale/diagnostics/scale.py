"""Of a state's scale and its direction: which of them a loss sees, and how both move from loop to loop (Paper A).

A readout r with r(αh) = r(h) for α > 0 makes ⟨∂L/∂h, h⟩ = 0 (Lemma 1, Euler's identity): the loss of a loop cannot see the
scale of the state that it decodes. Under F(h) = h + B(norm h) with h = s u, ‖u‖ = 1, and B = a u + b, b ⊥ u, the scale grows
by a + O(1/s) a visit, the direction becomes u + b/s + O(1/s²) (Lemma 2): where the scale drifts, the direction freezes. Scales
are L2 norms of tokens. S positions (those held here), B sequences, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from loopscale.objective.supervision import Exit
from loopscale.parallel.mesh import Mesh, sum_over_tensor_ranks
from loopscale.parallel.ring.execute import Stage

InputsT = TypeVar("InputsT")

FACTORS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""By which the final state is multiplied, those of Paper A."""
_TINY = 1e-30


@dataclass(frozen=True)
class Motion:
    """How far a visit takes the states of tokens from where they were, on average."""

    growth: float
    """‖F(h)‖ − ‖h‖."""
    growth_predicted: float
    """a, to first order in 1/s."""
    angle: float
    """Between F(h) and h, in radians."""
    angle_predicted: float
    """‖b‖ / s, to first order in 1/s."""


@dataclass(frozen=True)
class Sight:
    """What :class:`ScaleMeter` found."""

    radial_fractions: list[float | None] | None
    """Per loop: mean over tokens of |⟨g, h⟩| / (‖g‖ ‖h‖), g the gradient of the cross entropy of this loop's exit alone; None of
    one where no token has a gradient that is a number. Some 1e-8 behind a norm, where its eps / RMS² is less; √(2 / (π d)) of
    random directions. None where exits have no gradient."""
    motions: list[Motion | None]
    """Per loop; None of the first."""
    scaled_losses: dict[float, float]
    """Cross entropy, nats per scored token, of the final state times each of :data:`FACTORS`."""
    token_correlation: float
    """Mean cosine between the final states of different tokens of a sequence; 1 where all have collapsed into one direction."""


class ScaleMeter(Generic[InputsT]):
    """Looks at states through the observer of a forward of ``depth`` visits; :meth:`result` adds up over ranks.

    ``microbatches``: those that the observed forward reads, by number. Exits are asked for beside those of the forward; they
    should compute in fp32, for bf16 rounds gradients to some 1e-4 off the sphere. Every tensor-parallel rank of the home
    stage observes, for exits are theirs together. With ``differentiate`` unset no gradients are looked at.
    """

    def __init__(
        self, stage: Stage[InputsT], mesh: Mesh, microbatches: Sequence[InputsT], depth: int, *, differentiate: bool = True
    ):
        self._stage, self._mesh, self._microbatches = stage, mesh, microbatches
        self._depth, self._differentiate = depth, differentiate

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=mesh.device)

        self._radial, self._motion = zeros(depth, 2), zeros(depth, 5)  # sums, and the number of tokens
        self._scaled, self._cosines = zeros(len(FACTORS)), zeros(2)

    def observe(self, microbatch: int, visit: int, before: Tensor | None, after: Tensor) -> None:
        """States [S, B, d] before and after visit ``visit``."""
        inputs = self._microbatches[microbatch]
        if self._differentiate:
            fractions = radial_fractions(after, exit_gradient(self._stage, inputs, after, visit))
            self._radial[visit - 1] += torch.stack((fractions.sum(), torch.ones_like(fractions).sum()))
        with torch.no_grad():
            if before is not None:
                moved = motion(before, after).flatten(1)
                self._motion[visit - 1] += torch.cat((moved.sum(1), moved.new_tensor([moved.shape[1]])))
            if visit == self._depth:
                self._scaled += torch.stack([loss_at(self._stage, inputs, a * after, visit) for a in FACTORS])
                cosines = token_correlations(after, self._mesh)
                self._cosines += torch.stack((cosines.sum(), torch.ones_like(cosines).sum()))

    def result(self, sum_over_ranks: Callable[[Tensor], Tensor], tokens: int) -> Sight:
        """``tokens``: how many were scored, on all ranks. A collective."""
        mesh, parts = self._mesh, (self._radial, self._motion, self._scaled, self._cosines)
        counts = (mesh.sees_tokens, mesh.sees_tokens, mesh.reads, mesh.reads)  # what no other rank counts
        kept = [(part if here else torch.zeros_like(part)).flatten() for part, here in zip(parts, counts, strict=True)]
        summed = sum_over_ranks(torch.cat(kept)).cpu().split([part.numel() for part in parts])
        radial, moved, scaled, (cosines, sequences) = (x.view(p.shape) for x, p in zip(summed, parts, strict=True))
        means = (moved[:, :4] / moved[:, 4:].clamp(min=1)).tolist()
        return Sight(
            [total / n if n else None for total, n in radial.tolist()] if self._differentiate else None,
            [None, *(Motion(*mean) for mean in means[1:])],
            dict(zip(FACTORS, (scaled / max(tokens, 1)).tolist(), strict=True)),
            float(cosines / sequences.clamp(min=1)),
        )


def exit_gradient(stage: Stage[InputsT], inputs: InputsT, state: Tensor, visit: int) -> Tensor:
    """∂ Σ cross entropy / ∂h at the exit after ``visit`` alone: no later loop sends anything back. [S, B, d]."""
    leaf = state.detach().requires_grad_()
    with torch.enable_grad():
        total = stage.exit(inputs, Exit(visit, (visit,)), {visit: leaf}).tokens["cross_entropy"]
        (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


def radial_fractions(states: Tensor, gradients: Tensor) -> Tensor:
    """|⟨g, h⟩| / (‖g‖ ‖h‖) of the tokens that have a gradient, fp64 [tokens]; both [S, B, d]."""
    h, g = states.double(), gradients.double()
    norms = _norms(g)
    fractions = (g * h).sum(-1).abs() / (norms * _norms(h)).clamp(min=_TINY)
    return fractions[norms > 0]


def motion(before: Tensor, after: Tensor) -> Tensor:
    """Growth, growth predicted, angle and angle predicted of each token, as in :class:`Motion`; fp64 [4, S, B]."""
    h, f = before.double(), after.double()
    scale, grown = _norms(h).clamp(min=_TINY), _norms(f).clamp(min=_TINY)
    u, v, moved = h / scale[..., None], f / grown[..., None], f - h
    along = (moved * u).sum(-1)
    across = _norms(moved - along[..., None] * u)
    angle = 2 * torch.atan2(_norms(v - u), _norms(v + u))  # an arc cosine would lose small angles
    return torch.stack((grown - scale, along, angle, across / scale))


def token_correlations(states: Tensor, mesh: Mesh) -> Tensor:
    """Mean cosine between different tokens for each sequence, fp64 [B]; of a single token 0.

    Of S unit vectors with the mean m, S² ‖m‖² = S + Σ_{i≠j} cos(i, j).
    """
    directions = states.double() / _norms(states.double()).clamp(min=_TINY)[..., None]
    total, positions = directions.sum(0), len(states)
    if mesh.sequence_parallel:
        sum_over_tensor_ranks(total)
        positions *= mesh.tensor_size
    return (total.square().sum(-1) - positions) / max(positions * (positions - 1), 1)


def _norms(states: Tensor) -> Tensor:
    return torch.linalg.vector_norm(states, dim=-1)


def loss_at(stage: Stage[InputsT], inputs: InputsT, state: Tensor, visit: int) -> Tensor:
    """Σ cross entropy of the scored tokens, of ``state`` as that after ``visit``; fp64."""
    return stage.exit(inputs, Exit(visit, (visit,)), {visit: state}).losses.double().sum()


# ---- what becomes of the loss without radial motion


def at_scale_of(first: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``after`` with the RMS that each token has in ``first``."""
    return after * (_norms(first) / _norms(after).clamp(min=_TINY))[..., None]


def without_radial_part(first: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``after`` without that part of its change since ``before`` that lies along ``before``."""
    along = ((after - before) * before).sum(-1) / before.square().sum(-1).clamp(min=_TINY)
    return after - along[..., None] * before


CLAMPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"rms": at_scale_of, "radial": without_radial_part}
"""What becomes of a state: of those after the first visit, before and after this one."""


@torch.no_grad()
def clamped_losses(
    stage: Stage[InputsT],
    mesh: Mesh,
    microbatches: Sequence[InputsT],
    depth: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
    tokens: int,
) -> dict[str, float]:
    """Cross entropy after ``depth`` visits, nats per scored token, under each of :data:`CLAMPS`: from the second visit on it
    changes the state before that is decoded and goes into the next visit. For stages that have the whole core. A collective;
    ``tokens``: how many were scored, on all ranks."""
    sums = torch.zeros(len(CLAMPS), dtype=torch.float64, device=mesh.device)
    for inputs in microbatches:
        feed = stage.prelude(inputs)
        first = stage.visit(inputs, feed, None, 1)
        for i, clamp in enumerate(CLAMPS.values()):
            state = first
            for visit in range(2, depth + 1):
                state = clamp(first, state, stage.visit(inputs, feed, state, visit))
            sums[i] += loss_at(stage, inputs, state, depth)
        stage.finished(inputs)
    total = sum_over_ranks(sums if mesh.reads else torch.zeros_like(sums))
    return dict(zip(CLAMPS, (total / max(tokens, 1)).tolist(), strict=True))
