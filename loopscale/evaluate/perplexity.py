"""Loss by depth: one pass runs the deepest loop and decodes the state at every depth that is asked for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from loopscale.model.inputs import Inputs
from loopscale.model.ring import Ring
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import Exit
from loopscale.parallel.mesh import Mesh
from loopscale.parallel.ring.execute import Observer, Task, execute

LARGEST = math.log(sys.float_info.max)
"""Nats whose exponential is a number."""
WAVE = 8
"""Microbatches per stage that one ring plan takes; the ring drains between plans."""


def perplexity(nats: float) -> float:
    """exp(nats), infinite where that is no number."""
    return math.exp(nats) if not nats > LARGEST else math.inf


def loss_by_depth(
    stage: LoopedStage,
    ring: Ring,
    mesh: Mesh,
    microbatches: Iterable[Inputs],
    depths: Sequence[int],
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values,
    observe: Observer | None = None,
) -> tuple[dict[int, float], int]:
    """Mean cross entropy in nats per scored token at each of ``depths``, and the number of tokens.

    Every depth keeps its own keys and values (no cache is shared between visits), sequences are read whole, attention
    stays within documents. Each replica passes its own microbatches, the same on all its ranks and maybe none;
    ``sum_over_ranks`` adds up over all ranks; ``observe`` is called after every visit, see :func:`execute`, with the number
    of the microbatch among all of ``microbatches``.
    """
    exits = tuple(Exit(r, (r,)) for r in sorted(set(depths)))
    deepest = exits[-1].visit
    totals = torch.zeros(len(exits) + 1, dtype=torch.float64)
    tasks = (Task(inputs, deepest, deepest, exits) for inputs in microbatches)
    begun = 0
    while wave := list(islice(tasks, 1 if mesh.stages == 1 else WAVE * mesh.stages)):
        plan = ring.plan([task.work for task in wave], forward_only=True)
        outcomes = execute(plan, stage, wave, mesh.links, observe=observe and _counting_from(begun, observe))
        begun += len(wave)
        for task, outcome in zip(wave, outcomes, strict=True) if mesh.reads else ():
            totals[:-1] += torch.stack([outcome.losses[e.visit].double().sum() for e in exits]).cpu()
            totals[-1] += int((task.inputs.targets >= 0).sum())
    totals = sum_over_ranks(totals)
    tokens = int(totals[-1])
    return {e.visit: float(total) / max(tokens, 1) for e, total in zip(exits, totals, strict=False)}, tokens


def _counting_from(begun: int, observe: Observer) -> Observer:
    """An observer of a plan whose first microbatch is number ``begun``."""
    return lambda microbatch, *rest: observe(begun + microbatch, *rest)
