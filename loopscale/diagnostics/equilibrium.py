"""Of the fixed point that a looped state approaches: how fast it contracts, and what truncated backprop leaves out there.

One visit is h → F(h), injection and core; J = ∂F/∂h. Near a fixed point h* = F(h*) the distance to it shrinks in the long run
by the spectral radius κ of J at every visit. There the whole gradient is D (I − J)⁻¹, and that of the last b visits misses
D J^b (I − J)⁻¹ of it: some κ^b / (1 − κ) (Paper B). S positions (those held here), B sequences, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from loopscale.objective.supervision import Exit
from loopscale.parallel.mesh import Mesh, max_over_tensor_ranks, sum_over_replica, sum_over_replicas, sum_over_tensor_ranks
from loopscale.parallel.ring.execute import Stage, Task, execute
from loopscale.parallel.ring.plan import Plan, Work

InputsT = TypeVar("InputsT")
StageInputs = TypeVar("StageInputs", contravariant=True)

PERTURBATION = 1e-2
"""Size of a finite difference, relative to the norm of the state of the token that it moves most."""
_TINY = 1e-30


class WholeStage(Stage[StageInputs], Protocol[StageInputs]):
    """A stage that has the whole core."""

    compute: torch.dtype
    """Type of the products inside visits."""


@dataclass(frozen=True)
class TruncationError:
    """How the gradient g_b of the last b visits differs from that of all R, g_R; over all trained parameters."""

    error: float
    """‖g_b − g_R‖ / ‖g_R‖."""
    cosine: float
    """⟨g_b, g_R⟩ / (‖g_b‖ ‖g_R‖)."""


@torch.no_grad()
def contraction(
    stage: WholeStage[InputsT], mesh: Mesh, microbatches: Iterable[InputsT], *, visits: int, iterations: int
) -> float:
    """Spectral radius of J at the state after ``visits`` (2 or more), by power iteration; the mean over sequences.

    Attention couples the tokens of a sequence, so J is that of the whole state of a sequence. The growth of the iterated
    direction is averaged geometrically over the last half of ``iterations``, for a complex pair of eigenvalues makes it
    swing; of 32 the result is within some percent where many eigenvalues are nearly as large. Each replica passes its own
    microbatches, the same on all its ranks; some may have none, but not all. A collective.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    with in_fp32(stage):
        for inputs in microbatches:
            rates = _growth(stage, mesh, inputs, visits, iterations)
            sums += torch.tensor([float(rates.sum()), len(rates)], dtype=torch.float64)
            stage.finished(inputs)
    total, sequences = sum_over_replicas(sums).tolist()
    return total / sequences


@contextmanager
def in_fp32(stage: WholeStage[InputsT]) -> Iterator[None]:
    """Visits compute in fp32: the rounding of bf16 is as large as the differences that are looked at."""
    before, stage.compute = stage.compute, torch.float32
    try:
        yield
    finally:
        stage.compute = before


def _growth(stage: WholeStage[InputsT], mesh: Mesh, inputs: InputsT, visits: int, iterations: int) -> Tensor:
    """Spectral radius for each sequence, fp64 [B].

    J v is a central difference of plain forwards. Automatic differentiation would have to go through Megatron's autograd
    functions twice (reverse over reverse) or forwards, and they have neither derivative: with tensor parallelism the result
    would be wrong in silence.
    """
    feed = stage.prelude(inputs)
    first = stage.visit(inputs, feed, None, 1)
    state = stage.visit(inputs, feed, first, 2)
    direction = state - first  # not random, so that it is the same at every layout
    for visit in range(3, visits + 1):
        state = stage.visit(inputs, feed, state, visit)
    scale, growth = _token_norms(state), torch.zeros(state.shape[1], dtype=torch.float64, device=state.device)
    direction = direction / _sequence_norms(direction, mesh)[:, None]
    for i in range(iterations):
        # Relative to single tokens: a direction may gather in a few of them, where a part of the whole norm would be much.
        largest = (_token_norms(direction) / scale).amax(0)
        if mesh.sequence_parallel:
            max_over_tensor_ranks(largest)
        size = (PERTURBATION / largest.clamp(min=_TINY))[:, None]
        ahead, behind = (stage.visit(inputs, feed, state + sign * size * direction, visits + 1) for sign in (1, -1))
        product = (ahead - behind) / (2 * size)
        norms = _sequence_norms(product, mesh)
        direction = product / norms[:, None]
        if i >= iterations // 2:
            growth += norms.double().log()
    return (growth / (iterations - iterations // 2)).exp()


def _token_norms(states: Tensor) -> Tensor:
    """[S, B]."""
    return torch.linalg.vector_norm(states, dim=-1).clamp(min=_TINY)


def _sequence_norms(states: Tensor, mesh: Mesh) -> Tensor:
    """Norm of each sequence's state, over all positions and the width, [B]."""
    squares = torch.linalg.vector_norm(states, dim=(0, 2), dtype=torch.float64).square()
    if mesh.sequence_parallel:
        sum_over_tensor_ranks(squares)
    return squares.sqrt().clamp(min=_TINY).float()


def truncation_errors(
    stage: Stage[InputsT],
    plan: Callable[[Sequence[Work]], Plan],
    mesh: Mesh,
    microbatches: Sequence[InputsT],
    trained: Sequence[tuple[nn.Parameter, bool]],
    *,
    depth: int,
    gradient_visits: Sequence[int],
) -> dict[int, TruncationError]:
    """By b of ``gradient_visits``: the gradient of the last b of ``depth`` visits against full backprop through all of them,
    of the cross entropy at the last visit (Paper B measures the same of its truncation).

    ``plan`` makes the ring's plan; ``trained``: the parameters here, each with whether tensor-parallel ranks hold different
    parts of it. Their gradients must be None and are so again afterwards. Each replica passes its own microbatches, the same
    on all its ranks and maybe none. A collective. Visits are recomputed for their backward, so that full backprop keeps no more
    of a microbatch than the training of truncated depth does; the gradient that others are compared with waits in CPU memory.
    """

    def gradients(b: int) -> Iterator[Tensor]:
        """The whole gradient of each parameter here, one after the other."""
        tasks = [Task(inputs, depth, b, (Exit(depth, (depth,)),)) for inputs in microbatches]
        if tasks:
            execute(plan([task.work for task in tasks]), stage, tasks, mesh.links, recompute=True)
        for parameter, divided in trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
            if mesh.sequence_parallel and not divided:
                sum_over_tensor_ranks(gradient)  # each had the part of its positions
            yield sum_over_replicas(gradient)

    counted = [divided or mesh.tensor_rank == 0 for _, divided in trained]
    full = [gradient.cpu() for gradient in gradients(depth)]
    found = {}
    for b in gradient_visits:
        squares = torch.zeros(3, dtype=torch.float64)  # of g_b − g_R, g_b and g_R
        for own, whole, counts in zip(gradients(b), full, counted, strict=True):
            there = whole.to(own.device)
            if counts:
                squares += torch.stack([_square(own - there), _square(own), _square(there)]).cpu()
        missed, truncated, reference = sum_over_replica(squares).tolist()
        product = (truncated + reference - missed) / 2
        found[b] = TruncationError(
            error=(missed / max(reference, _TINY)) ** 0.5, cosine=product / max((truncated * reference) ** 0.5, _TINY)
        )
    return found


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64).square()
