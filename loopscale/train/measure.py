"""How long a model's operations take on this machine, and the slices of the core that follow."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median

import torch

from loopscale.config import Batch, Config
from loopscale.environment.compute import compute_type
from loopscale.environment.kernels import choose_kernels
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.ring import even_slices, work_of
from loopscale.objective.supervision import exits
from loopscale.parallel.mesh import Mesh, Place, on_main
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.plan import Costs, Kind, Operation, plan
from loopscale.train.step import build_stage

REPEATS = 5


def measured_slices(config: Config, batch: Batch, mesh: Mesh) -> tuple[int, ...]:
    """Core layers of each stage by times measured on rank 0: of a home stage without core layers, and of one with one
    more. A collective: every rank measures, as all of them will compute at once."""
    bare, with_one = (home_costs(config, batch, mesh, own) for own in (0, 1))
    layer = with_one.visit[0] - bare.visit[0], with_one.visit_backward[0] - bare.visit_backward[0]
    return on_main(lambda: even_slices(config, bare, (max(layer[0], 0.0), max(layer[1], 0.0))))


def home_costs(config: Config, batch: Batch, mesh: Mesh, own: int) -> Costs:
    """Seconds of each operation of a home stage with ``own`` core layers, for one microbatch of made-up tokens."""
    place = Place(0, (own, config.model.core_layers - own), mesh.tensor_rank, mesh.tensor_size, mesh.sequence_parallel)
    length, size, depth = config.corpus.sequence_length, batch.microbatch, max(2, config.depth.evaluation_depth)
    kernels = choose_kernels(config, mesh.device, compute_type(config, mesh.device))
    stage = build_stage(config, place, mesh.device, kernels)
    tokens = torch.randint(config.model.vocabulary, (size, length + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(mesh.device)
    inputs = Inputs(
        tokens[:, :-1], tokens[:, 1:].contiguous(), Documents.whole(size, length, mesh.device),
        torch.arange(size, device=mesh.device), final_visit=depth,
    )  # fmt: skip
    work = work_of(config, depth)
    task = Task(inputs, depth, work.gradient_visits, exits(config.objective, depth, config.depth.gradient_visits(depth)))
    watch = Stopwatch(mesh.device)
    for _ in range(REPEATS):
        alone = plan(1, [task.work], in_flight=1)
        execute(
            alone, stage, [task], Links.alone(), recompute=config.train.recompute == "visit",
            offload=config.train.offload_activations, tell=watch.begin,
        )  # fmt: skip
        watch.end()
    return Costs(
        watch.median(Kind.PRELUDE),
        (watch.median(Kind.VISIT),),
        (watch.median(Kind.VISIT_BACKWARD),),
        watch.median(Kind.EXIT),
        watch.median(Kind.PRELUDE_BACKWARD),
    )


class Stopwatch:
    """Seconds of operations, each from its beginning to that of the next."""

    def __init__(self, device: torch.device):
        self._device, self._seconds = device, defaultdict[Kind, list[float]](list)
        self._running: tuple[Kind, float] | None = None

    def begin(self, operation: Operation) -> None:
        self.end()
        self._running = operation.kind, time.perf_counter()

    def end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._running is not None:
            kind, began = self._running
            self._seconds[kind].append(time.perf_counter() - began)
        self._running = None

    def pause(self, seconds: float) -> None:
        """Takes ``seconds`` off the running operation: it waited."""
        if self._running is not None:
            self._running = self._running[0], self._running[1] + seconds

    def median(self, kind: Kind) -> float:
        """0 for a kind that never ran."""
        return median(self._seconds[kind]) if self._seconds[kind] else 0.0
