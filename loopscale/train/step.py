"""One optimizer step: depth draws, ring plan, execution, two sums per depth group to all ranks, ZeRO's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from loopscale.config import Batch, Config
from loopscale.corpus.batches import Microbatch, StepBatch
from loopscale.depth import DepthController, GroupSums, make_law
from loopscale.environment.compute import compute_type
from loopscale.environment.kernels import Kernels, choose_kernels
from loopscale.errors import ClusterError
from loopscale.model.inputs import Inputs
from loopscale.model.ring import Ring, draws_at, work_of, works_at
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import exits, is_trained, term_names
from loopscale.parallel.mesh import Mesh, Place, gather_objects, sum_over_ranks, sum_over_replicas
from loopscale.parallel.ring.execute import Observer, Task, execute
from loopscale.parallel.ring.plan import Operation, Plan, Work
from loopscale.parallel.watch import Watch
from loopscale.parallel.zero import ZeroOptimizer
from loopscale.train.dropped import describe_rank
from loopscale.train.replicas import check_replicas
from loopscale.train.schedule import share_of_peak
from loopscale.train.spikes import Spike

KEPT_PLANS = 64
"""Plans that are kept for steps of the same depths."""


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
    spike: Spike | None
    """Set when the step was skipped everywhere for its loss."""
    ranks: list[dict[str, Any]]
    """Of a skipped step, what each rank met, see :mod:`loopscale.train.dropped`; else empty."""
    stop_ranks: int
    """Ranks that were asked to stop."""

    @property
    def skipped(self) -> bool:
        """Whether the update was dropped."""
        return self.bad_ranks > 0 or self.spike is not None

    @property
    def loss(self) -> float:
        """The objective."""
        return sum(self.terms.values())

    @property
    def terminal_loss(self) -> float:
        """Cross entropy at the last visit, nats per scored token."""
        return sum(g.loss for g in self.groups) / max(sum(g.tokens for g in self.groups), 1)


class TrainStep:
    """Everything a step needs that outlives it: this rank's part of the model, its optimizer, and the ring's plans."""

    def __init__(self, config: Config, batch: Batch, ring: Ring, mesh: Mesh):
        self.config, self.batch, self.ring, self.mesh = config, batch, ring, mesh
        self.kernels = choose_kernels(config, mesh.device, compute_type(config, mesh.device))
        self.stage = build_stage(config, mesh.place(ring.slices), mesh.device, self.kernels)
        self.trained = [(h, p) for h, p in self.stage.held() if is_trained(config.objective, h.parameter)]
        self.stage.requires_grad_(False)
        for _, parameter in self.trained:
            parameter.requires_grad_(True)
        self.optimizer = ZeroOptimizer(
            {h.parameter: p for h, p in self.trained},
            {h.parameter: h.weights[0].kind for h, _ in self.trained},
            config.optimizer,
            config.parallel.zero,
            divided={h.parameter for h, _ in self.trained if h.tensor_axis is not None and mesh.tensor_size > 1},
            partial=mesh.sequence_parallel,
            offload=config.parallel.offload_optimizer,
            adam=self.kernels.adam,
        )
        self.law: DepthController = make_law(config.depth)
        self.term_names = term_names(config.objective)
        self._plans = Planner(ring)
        self._plan_compared = False

    def __call__(
        self,
        step: int,
        data: StepBatch,
        *,
        stop: bool = False,
        observe: Observer | None = None,
        find_spike: Callable[[Sequence[GroupSums]], Spike | None] | None = None,
    ) -> StepResult:
        """Runs step ``step`` (0-based) on this rank's share of the global batch. A collective.

        The update is dropped on all ranks where a loss or gradient is not finite on any, or where ``find_spike``, which
        hears the sums of all ranks and answers alike on each, finds one.
        """
        config, groups, mesh = self.config, self.batch.groups, self.mesh
        mesh.watch.doing = f"adding up the tokens of step {step + 1}"
        draws = draws_at(config, self.batch, self.law, step)
        depths = [max(own) for own in draws]
        scored = torch.tensor([sum(int((m.targets >= 0).sum()) for m in g) for g in data.groups], dtype=torch.float64)
        with mesh.waits.waiting():
            scored = sum_over_replicas(scored)
        tasks = self._tasks(step, data, draws, depths, float(scored.sum()))
        work = tuple(t.work for t in tasks)
        plan = self._plans.get(work)
        self._compare(step, plan)
        outcomes = execute(
            plan, self.stage, tasks, mesh.links,
            recompute=config.train.recompute == "visit", offload=config.train.offload_activations, observe=observe,
            tell=partial(_tell, mesh.watch, step + 1),
        )  # fmt: skip

        mesh.watch.doing = f"adding up losses and gradients of step {step + 1}"
        last_exit, terms = torch.zeros(groups, dtype=torch.float64), torch.zeros(len(self.term_names), dtype=torch.float64)
        for i, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True) if mesh.reads else ()):
            last_exit[i // self.batch.microbatches_per_group] += outcome.losses[task.depth].double().sum().cpu()
            terms += torch.stack([outcome.terms[name].double().cpu() for name in self.term_names]) / mesh.data_size
        bad = not torch.isfinite(terms).all() or not self._gradients_finite()
        sums = torch.cat((last_exit, terms, torch.tensor([bad, stop], dtype=torch.float64)))
        with mesh.waits.waiting():
            sums = sum_over_ranks(sums)
        last_exit, terms, (bad_ranks, stop_ranks) = sums.split((groups, len(terms), 2))

        told = tuple(GroupSums(r, float(s), int(n)) for r, s, n in zip(depths, last_exit, scored, strict=True))
        spike = None if bad_ranks or find_spike is None else find_spike(told)
        ranks = list[dict[str, Any]]()
        if bad_ranks or spike is not None:
            ranks = gather_objects(describe_rank(mesh, self.batch.microbatches_per_group, tasks, outcomes, self.trained))
            self.optimizer.drop_gradients()
        else:
            self.law.update(told)
        if step + 1 < config.train.steps:  # planned while the optimizer steps and the next data are read
            self._plans.prepare(works_at(config, self.batch, draws_at(config, self.batch, self.law, step + 1)))
        share = share_of_peak(config.optimizer, step, config.train.steps)
        return StepResult(
            terms=dict(zip(self.term_names, terms.tolist(), strict=True)),
            draws=tuple(chain.from_iterable(draws)),
            groups=told,
            grad_norm=None if ranks else self.optimizer.step(share),
            lr=share * config.optimizer.lr,
            work=work,
            bad_ranks=int(bad_ranks),
            spike=spike,
            ranks=ranks,
            stop_ranks=int(stop_ranks),
        )

    def _compare(self, step: int, plan: Plan) -> None:
        """Ranks of a ring that followed different plans would wait for ever; replicas with different laws would train on
        other depths than they say, in silence. So plans are compared before the first step, and laws and weights then and
        every so often."""
        first = not self._plan_compared
        if first and self.mesh.stages * self.mesh.tensor_size > 1:
            _same_on_all_ranks("the step's plan", plan.digest(), ": configuration or code differs")
        self._plan_compared = True
        every = self.config.depth.check_every
        if self.mesh.world > 1 and every and step % every == 0:
            _same_on_all_ranks("the law of the depths", self.law.digest(), "; go on from the last checkpoint")
        every = self.config.parallel.check_replicas
        if every and (first or step % every == 0):
            check_replicas(self.stage, self.mesh)

    def _tasks(
        self, step: int, data: StepBatch, draws: Sequence[Sequence[int]], depths: Sequence[int], scored: float
    ) -> list[Task[Inputs]]:
        """Loss is divided by the globally scored tokens before backward; DeepSpeed's averaging over ranks is undone."""
        tasks, drawn = [], list(chain.from_iterable(draws))
        for depth, group in zip(depths, data.groups, strict=True):
            work = work_of(self.config, depth)
            supervision = exits(self.config.objective, depth, self.config.depth.gradient_visits(depth))
            token_scale, sequence_scale = self.mesh.data_size / max(scored, 1.0), self.mesh.data_size / self.batch.global_batch
            for microbatch in group:
                starts = self._first_visits(microbatch, data.first, drawn, depth)
                inputs = Inputs.of(microbatch, self.mesh.device, final_visit=depth, step=step, first_visits=starts)
                tasks.append(Task(inputs, depth, work.gradient_visits, supervision, token_scale, sequence_scale))
        return tasks

    def _first_visits(self, microbatch: Microbatch, first: int, draws: Sequence[int], depth: int) -> Tensor | None:
        """Per-sequence depths end together: a sequence of R visits begins at visit R_max − R + 1."""
        if not self.config.depth.per_sequence:
            return None
        return torch.tensor([depth - draws[sample - first] + 1 for sample in microbatch.samples.tolist()])

    def _gradients_finite(self) -> bool:
        gradients: list[Tensor] = [p.grad for p in self.stage.parameters() if p.grad is not None]
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients)).sum()))


def build_stage(config: Config, place: Place, device: torch.device, kernels: Kernels) -> LoopedStage:
    """The part of the model at ``place``, as a run trains it."""
    return LoopedStage(
        config.model, config.corpus.sequence_length, seed=config.run.seed, place=place, objective=config.objective,
        compute=compute_type(config, device), loss_chunk=config.train.loss_chunk,
        recompute_layers=config.train.recompute == "layer", kernels=kernels.layers, device=device,
    )  # fmt: skip


class Planner:
    """Plans of a ring, each made once; the next step's is made by a thread while this step computes."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._thread = ThreadPoolExecutor(1)
        self._plans: dict[tuple[Work, ...], Future[Plan]] = {}

    def prepare(self, work: tuple[Work, ...]) -> None:
        """Begins to plan ``work`` unless that was done before."""
        if work not in self._plans:
            while len(self._plans) >= KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[work] = self._thread.submit(self._ring.plan, work)

    def get(self, work: tuple[Work, ...]) -> Plan:
        """The plan of ``work``."""
        self.prepare(work)
        return self._plans[work].result()


def _same_on_all_ranks(what: str, digest: str, remedy: str) -> None:
    """Raises :class:`ClusterError` with the ranks where ``what`` has another ``digest`` than on rank 0. A collective."""
    digests = gather_objects(digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        where = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        raise ClusterError(f"{what} on {where} is not that of rank 0{remedy}")


def _tell(watch: Watch, step: int, operation: Operation) -> None:
    kind = operation.kind.replace("_", " ")
    of = f"{kind} {operation.visit}" if operation.visit else kind
    watch.doing = f"running {of} of microbatch {operation.microbatch} of step {step}"
