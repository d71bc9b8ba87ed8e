"""One optimizer step: depth draws, ring plan, execution, two sums per depth group to all ranks, ZeRO's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from loopscale.config import Batch, Config
from loopscale.corpus.batches import Microbatch, StepBatch
from loopscale.depth import DepthLaw, draw_depths
from loopscale.model.inputs import Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import exits, term_names
from loopscale.parallel.mesh import Mesh, sum_over_ranks
from loopscale.parallel.ring.execute import Observer, Task, execute
from loopscale.parallel.ring.plan import Plan, Work, plan
from loopscale.parallel.zero import ZeroOptimizer
from loopscale.train.schedule import share_of_peak


@dataclass(frozen=True)
class GroupSums:
    """What one depth group tells all ranks: Σ loss of the last exit over its scored tokens, and their number."""

    depth: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step, equal on all ranks."""

    terms: dict[str, float]
    """The parts of the objective; they add up to it. Cross entropy is in nats per scored token."""
    draws: tuple[int, ...]
    """Depths drawn: one per group, or one per sequence of the global batch."""
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
    def loss(self) -> float:
        """The objective."""
        return sum(self.terms.values())

    @property
    def terminal_loss(self) -> float:
        """Cross entropy at the last visit, nats per scored token."""
        return sum(g.loss for g in self.groups) / max(sum(g.tokens for g in self.groups), 1)


class TrainStep:
    """Everything a step needs that outlives it."""

    def __init__(self, config: Config, batch: Batch, stage: LoopedStage, optimizer: ZeroOptimizer, mesh: Mesh):
        self.config, self.batch, self.stage, self.optimizer, self.mesh = config, batch, stage, optimizer, mesh
        self.law = DepthLaw(config.depth)
        self.term_names = term_names(config.objective)
        self._plan = lru_cache(maxsize=64)(_one_stage_plan)

    def __call__(self, step: int, data: StepBatch, *, stop: bool = False, observe: Observer | None = None) -> StepResult:
        """Runs step ``step`` (0-based) on this rank's share of the global batch. A collective."""
        config, groups = self.config, self.batch.groups
        prior = self.law.at(step / config.train.steps)
        draws = draw_depths(prior, config.run.seed, step, self.batch.global_batch if config.depth.per_sequence else groups)
        depths = [max(own) for own in self._by_group(draws)]
        scored = sum_over_ranks(
            torch.tensor([sum(int((m.targets >= 0).sum()) for m in g) for g in data.groups], dtype=torch.float64)
        )
        tasks = self._tasks(step, data, draws, depths, float(scored.sum()))
        work = tuple(t.work for t in tasks)
        outcomes = execute(self._plan(work), self.stage, tasks, recompute=config.train.recompute == "visit", observe=observe)

        last_exit, terms = torch.zeros(groups, dtype=torch.float64), torch.zeros(len(self.term_names), dtype=torch.float64)
        for i, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True)):
            last_exit[i // self.batch.microbatches_per_group] += outcome.losses[task.depth].double().sum().cpu()
            terms += torch.stack([outcome.terms[name].double().cpu() for name in self.term_names]) / self.mesh.data_size
        bad = not torch.isfinite(terms).all() or not self._gradients_finite()
        sums = sum_over_ranks(torch.cat((last_exit, terms, torch.tensor([bad, stop], dtype=torch.float64))))
        last_exit, terms, (bad_ranks, stop_ranks) = sums.split((groups, len(terms), 2))

        share = share_of_peak(config.optimizer, step, config.train.steps)
        if bad_ranks:
            self.optimizer.drop_gradients()
        return StepResult(
            terms=dict(zip(self.term_names, terms.tolist(), strict=True)),
            draws=draws,
            groups=tuple(GroupSums(r, float(s), int(n)) for r, s, n in zip(depths, last_exit, scored, strict=True)),
            grad_norm=None if bad_ranks else self.optimizer.step(share),
            lr=share * config.optimizer.lr,
            work=work,
            bad_ranks=int(bad_ranks),
            stop_ranks=int(stop_ranks),
        )

    def _by_group(self, draws: Sequence[int]) -> list[Sequence[int]]:
        """Draws of each group: one, or one per sequence."""
        size = len(draws) // self.batch.groups
        return [draws[g * size : (g + 1) * size] for g in range(self.batch.groups)]

    def _tasks(
        self, step: int, data: StepBatch, draws: Sequence[int], depths: Sequence[int], scored: float
    ) -> list[Task[Inputs]]:
        """Loss is divided by the globally scored tokens before backward; DeepSpeed's averaging over ranks is undone."""
        tasks = []
        for depth, group in zip(depths, data.groups, strict=True):
            b = self.config.depth.gradient_visits(depth)
            supervision = exits(self.config.objective, depth, b)
            token_scale, sequence_scale = self.mesh.data_size / max(scored, 1.0), self.mesh.data_size / self.batch.global_batch
            for microbatch in group:
                starts = self._first_visits(microbatch, data.first, draws, depth)
                inputs = Inputs.of(microbatch, self.mesh.device, final_visit=depth, step=step, first_visits=starts)
                tasks.append(Task(inputs, depth, b, supervision, token_scale, sequence_scale))
        return tasks

    def _first_visits(self, microbatch: Microbatch, first: int, draws: Sequence[int], depth: int) -> Tensor | None:
        """Per-sequence depths end together: a sequence of R visits begins at visit R_max − R + 1."""
        if not self.config.depth.per_sequence:
            return None
        return torch.tensor([depth - draws[sample - first] + 1 for sample in microbatch.samples.tolist()])

    def _gradients_finite(self) -> bool:
        gradients: list[Tensor] = [p.grad for p in self.stage.parameters() if p.grad is not None]
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients)).sum()))


def _one_stage_plan(work: tuple[Work, ...]) -> Plan:
    return plan(1, work, in_flight=1)
