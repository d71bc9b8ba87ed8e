"""Loss by depth: one pass runs the deepest loop and decodes the state at every depth that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from loopscale.model.inputs import Inputs
from loopscale.model.stage import LoopedStage
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.plan import Work, plan


def loss_by_depth(
    stage: LoopedStage,
    microbatches: Iterable[Inputs],
    depths: Sequence[int],
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values,
) -> tuple[dict[int, float], int]:
    """Mean cross entropy in nats per scored token at each of ``depths``, and the number of tokens.

    Every depth keeps its own keys and values (no cache is shared between visits), sequences are read whole, attention
    stays within documents. With several data-parallel ranks each passes its own microbatches and ``sum_over_ranks``.
    """
    exits = tuple(sorted(set(depths)))
    work = Work(exits[-1], exits[-1], exits)
    forward = plan(1, [work], in_flight=1, forward_only=True)
    totals = torch.zeros(len(exits) + 1, dtype=torch.float64)
    for inputs in microbatches:
        losses = execute(forward, stage, [Task(inputs, work, {})], forward_only=True)[0]
        totals[:-1] += torch.stack([losses[r].double().sum() for r in exits]).cpu()
        totals[-1] += int((inputs.targets >= 0).sum())
    totals = sum_over_ranks(totals)
    tokens = int(totals[-1])
    return {r: float(totals[i]) / max(tokens, 1) for i, r in enumerate(exits)}, tokens
