"""One optimizer step: depth draws, ring plan, execution, two sums per depth group to all ranks, ZeRO's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from loopscale.config import Batch, Config
from loopscale.corpus.batches import StepBatch
from loopscale.depth import Prior, draw_depths
from loopscale.model.inputs import Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import exit_weights
from loopscale.parallel.mesh import Mesh, sum_over_ranks
from loopscale.parallel.ring.execute import Observer, Task, execute
from loopscale.parallel.ring.plan import Plan, Work, plan
from loopscale.parallel.zero import ZeroOptimizer
from loopscale.train.schedule import learning_rate


@dataclass(frozen=True)
class GroupSums:
    """What one depth group tells all ranks: Σ loss of the last exit over its scored tokens, and their number."""

    depth: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step, equal on all ranks."""

    loss: float
    """The objective, nats per scored token."""
    groups: tuple[GroupSums, ...]
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None when the step was skipped."""
    lr: float
    work: tuple[Work, ...]
    """Work of this rank's microbatches."""
    bad_ranks: int
    """Ranks that met a non-finite loss or gradient; above 0 the step was skipped everywhere."""
    stop_ranks: int
    """Ranks that were asked to stop."""

    @property
    def terminal_loss(self) -> float:
        """Cross entropy at the last visit, nats per scored token."""
        return sum(g.loss for g in self.groups) / max(sum(g.tokens for g in self.groups), 1)


class TrainStep:
    """Everything a step needs that outlives it."""

    def __init__(self, config: Config, batch: Batch, prior: Prior, stage: LoopedStage, optimizer: ZeroOptimizer, mesh: Mesh):
        self.config, self.batch, self.prior, self.stage, self.optimizer, self.mesh = config, batch, prior, stage, optimizer, mesh
        self._plan = lru_cache(maxsize=64)(_one_stage_plan)

    def __call__(self, step: int, data: StepBatch, *, stop: bool = False, observe: Observer | None = None) -> StepResult:
        """Runs step ``step`` (0-based) on this rank's share of the global batch. A collective."""
        config = self.config
        depths = draw_depths(self.prior, config.run.seed, step, self.batch.groups)
        inputs = [[Inputs.of(m, self.mesh.device, step) for m in group] for group in data.groups]
        scored = sum_over_ranks(torch.tensor([sum(int((m.targets >= 0).sum()) for m in g) for g in inputs], dtype=torch.float64))
        tasks = self._tasks(inputs, depths, float(scored.sum()))
        work = tuple(t.work for t in tasks)
        losses = execute(self._plan(work), self.stage, tasks, recompute=config.train.recompute == "visit", observe=observe)

        sums = torch.zeros(len(depths) + 3, dtype=torch.float64)  # each group's last exit, objective, bad ranks, stop requests
        for i, (task, own) in enumerate(zip(tasks, losses, strict=True)):
            sums[i // self.batch.microbatches_per_group] += own[task.work.depth].double().sum().cpu()
            sums[-3] += sum(task.scales[r] / self.mesh.data_size * own[r].double().sum().cpu() for r in own)
        sums[-2] = float(not torch.isfinite(sums[-3]) or not self._gradients_finite())
        sums[-1] = float(stop)
        sums = sum_over_ranks(sums)

        lr = learning_rate(config.optimizer, step, config.train.steps)
        if bad := int(sums[-2]):
            self.optimizer.drop_gradients()
        return StepResult(
            loss=float(sums[-3]),
            groups=tuple(GroupSums(r, float(s), int(n)) for r, s, n in zip(depths, sums[:-3], scored, strict=True)),
            grad_norm=None if bad else self.optimizer.step(lr),
            lr=lr,
            work=work,
            bad_ranks=bad,
            stop_ranks=int(sums[-1]),
        )

    def _tasks(self, inputs: Sequence[Sequence[Inputs]], depths: Sequence[int], scored: float) -> list[Task[Inputs]]:
        """Loss is divided by the globally scored tokens before backward; DeepSpeed's averaging over ranks is undone."""
        tasks = []
        for depth, group in zip(depths, inputs, strict=True):
            b = self.config.depth.gradient_visits(depth)
            weights = exit_weights(self.config.objective, depth, b)
            work = Work(depth, b, tuple(weights))
            scales = {r: w * self.mesh.data_size / max(scored, 1.0) for r, w in weights.items()}
            tasks += [Task(m, work, scales) for m in group]
        return tasks

    def _gradients_finite(self) -> bool:
        gradients: list[Tensor] = [p.grad for p in self.stage.parameters() if p.grad is not None]
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients)).sum()))


def _one_stage_plan(work: tuple[Work, ...]) -> Plan:
    return plan(1, work, in_flight=1)
