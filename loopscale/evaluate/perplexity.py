"""Loss by depth: one pass runs the deepest loop and decodes the state at every depth that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from loopscale.model.inputs import Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import Exit
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
    exits = tuple(Exit(r, (r,)) for r in sorted(set(depths)))
    deepest = exits[-1].visit
    forward = plan(1, [Work(deepest, deepest, tuple(e.visit for e in exits))], in_flight=1, forward_only=True)
    totals = torch.zeros(len(exits) + 1, dtype=torch.float64)
    for inputs in microbatches:
        losses = execute(forward, stage, [Task(inputs, deepest, deepest, exits)], forward_only=True)[0].losses
        totals[:-1] += torch.stack([losses[e.visit].double().sum() for e in exits]).cpu()
        totals[-1] += int((inputs.targets >= 0).sum())
    totals = sum_over_ranks(totals)
    tokens = int(totals[-1])
    return {e.visit: float(total) / max(tokens, 1) for e, total in zip(exits, totals, strict=False)}, tokens
