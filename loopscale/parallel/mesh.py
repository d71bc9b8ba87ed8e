"""Ranks and their groups: torch.distributed and Megatron's parallel_state, started once per process.

A replica is one whole model: ``stages`` of the ring, each on ``tensor_size`` ranks that share its layers. Replicas read
different data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from loopscale.config.show import differences
from loopscale.config.tree import ParallelConfig, Section
from loopscale.environment.megatron import run_on_cpu
from loopscale.errors import ClusterError, ConfigError, LoopscaleError, Problem, UsageError, describe_fault
from loopscale.parallel.ring.links import Links
from loopscale.parallel.waits import Waits
from loopscale.parallel.watch import Watch

Result = TypeVar("Result")

STARTING = timedelta(minutes=5)
"""How long ranks wait for each other at the start, when some of them are still importing."""


@dataclass(frozen=True)
class Place:
    """What part of the model a rank holds: a stage's slice of the core (home, stage 0, has all that is not core too), and
    of its layers the share of one tensor-parallel rank. By default the whole model."""

    stage: int = 0
    slices: tuple[int, ...] | None = None
    """Core layers of each stage; None: one stage with all of them."""
    tensor_rank: int = 0
    tensor_size: int = 1
    sequence_parallel: bool = False

    @property
    def is_home(self) -> bool:
        return self.stage == 0

    def core_layers(self, total: int) -> range:
        """Numbers of the core layers held here."""
        if self.slices is None:
            return range(total)
        first = sum(self.slices[: self.stage])
        return range(first, first + self.slices[self.stage])


@dataclass(frozen=True)
class Mesh:
    """Where this process stands, its device, and how it talks to the ranks around it."""

    rank: int
    world: int
    local_rank: int
    local_size: int
    device: torch.device
    data_rank: int
    data_size: int
    stage: int
    stages: int
    tensor_rank: int
    tensor_size: int
    sequence_parallel: bool
    links: Links
    watch: Watch
    waits: Waits

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that logs."""
        return self.rank == 0

    @property
    def is_home(self) -> bool:
        """Whether this rank's stage holds what is not core: losses arise here."""
        return self.stage == 0

    @property
    def reads(self) -> bool:
        """Whether this is the rank of its replica that reads data and reports losses."""
        return self.is_home and self.tensor_rank == 0

    @property
    def sees_tokens(self) -> bool:
        """Whether states of tokens come by here that no other rank counts."""
        return self.reads or (self.is_home and self.sequence_parallel)

    def place(self, slices: tuple[int, ...]) -> Place:
        """This rank's part of a model whose core is cut into ``slices``."""
        return Place(self.stage, slices, self.tensor_rank, self.tensor_size, self.sequence_parallel)


def world_from_environment() -> tuple[int, int]:
    """(rank, world size) as torchrun or a launcher has set them; (0, 1) when none has."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def replicas(parallel: ParallelConfig, world: int) -> int:
    """Data-parallel replicas that ``world`` ranks make; raises :class:`ConfigError` when they do not divide."""
    size = parallel.tensor * parallel.pipeline
    if world % size:
        key = "tensor" if parallel.pipeline == 1 else "pipeline"
        sentence = (
            f"is {getattr(parallel, key)}: parallel.tensor {parallel.tensor} × parallel.pipeline {parallel.pipeline} does not "
            f"divide {world} rank(s); start a multiple of {size} ranks, or change one of the two"
        )
        raise ConfigError("layout", [Problem(f"parallel.{key}", sentence)])
    return world // size


def start(parallel: ParallelConfig) -> Mesh:
    """Joins the process group, builds Megatron's groups and the links to neighbouring stages.

    NCCL for tensors on a GPU, gloo for those on the CPU (the fp64 sums of a step). A single process needs no address:
    its store lives in memory. Raises :class:`ConfigError` when the layout does not fit the number of ranks and
    :class:`ClusterError` when the other ranks cannot be reached.
    """
    rank, world = world_from_environment()
    replicas(parallel, world)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif parallel.tensor > 1:
        run_on_cpu()
    try:
        return _start(parallel, rank, world, local_rank, local_size, device)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise ClusterError(f"rank {rank} of {world} could not join the others at {where}: {error}") from error


def _start(parallel: ParallelConfig, rank: int, world: int, local_rank: int, local_size: int, device: torch.device) -> Mesh:
    from megatron.core import parallel_state

    timeout = timedelta(seconds=parallel.timeout)
    store = _join(rank, world, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
    require_same(parallel, "parallel.")  # ranks that divided themselves differently would wait for each other for ever
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            order=parallel.order,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=parallel.timeout / 60,  # it makes a timedelta of it
        )
    ring = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    stage, tensor_rank = ring.index(rank), parallel_state.get_tensor_model_parallel_rank()
    role = f"stage {stage}" + (f", tensor rank {tensor_rank}" if parallel.tensor > 1 else "")
    waits = Waits(device)
    watch = Watch(store, rank, world, role, waits)
    return Mesh(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_size=local_size,
        device=device,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        stage=stage,
        stages=len(ring),
        tensor_rank=tensor_rank,
        tensor_size=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        links=Links(ring, rank, device, timeout, waits),
        watch=watch,
        waits=waits,
    )


def _join(rank: int, world: int, backend: str, timeout: timedelta) -> dist.Store:
    """Joins the default process group, or finds it joined; returns a store that all its ranks see."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    store: dist.Store = dist.HashStore()
    if world > 1:
        store, _, _ = next(dist.rendezvous("env://", timeout=STARTING))
        _wait_for_all(store, rank, world)
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return store


def _wait_for_all(store: dist.Store, rank: int, world: int) -> None:
    """Groups are made within the timeout of a run, but imports on a busy machine may keep a rank from arriving as long."""
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{r}" for r in range(world)], STARTING)
    except dist.DistError:
        missing = [r for r in range(world) if not store.check([f"here/{r}"])]
        raise ClusterError(f"ranks {missing} of {world} have not started within {STARTING.seconds} s") from None


def patient_group(seconds: float) -> dist.ProcessGroup | None:
    """A group of all ranks, over gloo, in which one may keep the others waiting for ``seconds``; None for a single rank. A
    collective."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def require_same(config: Section, prefix: str = "") -> None:
    """Raises :class:`ClusterError` where a rank was started with another ``config`` than rank 0. A collective."""
    first, *others = gather_objects(config.model_dump(mode="json")) if dist.get_world_size() > 1 else [{}]
    for rank, other in enumerate(others, 1):
        for key, expected, found in differences(first, other, prefix):
            sentence = f"{key} is {found} on rank {rank} and {expected} on rank 0"
            raise ClusterError(f"{sentence}; start all ranks with one configuration")


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or silent: the backends raise plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(sign in text for sign in ("gloo/", "NCCL", "Connection closed", "Timed out"))


def on_main(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Runs ``action`` on rank 0 and gives its result, or raises its error, on every rank (of ``group``). A collective.

    A fault of the file system is raised as :class:`UsageError` with the path and the reason.
    """
    return _on_first(action, group or dist.group.WORLD, nullcontext)


def on_reader(mesh: Mesh, action: Callable[[], Result]) -> Result:
    """As :func:`on_main`, but on the reading rank of each replica, for the ranks of the replica."""
    from megatron.core import parallel_state

    group = parallel_state.get_model_parallel_group() if mesh.stages * mesh.tensor_size > 1 else None
    return _on_first(action, group, mesh.waits.waiting)


def _on_first(
    action: Callable[[], Result], group: dist.ProcessGroup | None, waiting: Callable[[], AbstractContextManager[None]]
) -> Result:
    """Runs ``action`` on the lowest rank of ``group``; None: on this rank alone. ``waiting`` times the wait for the answer."""
    first = True if group is None else dist.get_rank(group) == 0
    answer: list[Any] = [None, None]
    if first:
        try:
            answer[0] = action()
        except LoopscaleError as error:
            answer[1] = error
        except OSError as error:
            answer[1] = UsageError(describe_fault(error))
    if group is not None and dist.get_world_size(group) > 1:
        with waiting():
            dist.broadcast_object_list(answer, group=group, group_src=0, device=torch.device("cpu"))
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Adds ``values`` over all ranks (of ``group``), in place; with one rank it costs nothing."""
    return _sum(values, group) if dist.is_initialized() else values


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks, in place; with one rank it costs nothing."""
    return _reduce(values, None, dist.ReduceOp.MAX) if dist.is_initialized() else values


def sum_over_replicas(values: Tensor) -> Tensor:
    """Adds ``values`` over the ranks that hold this rank's part of the model, in place."""
    from megatron.core import parallel_state

    return _sum(values, parallel_state.get_data_parallel_group())


def sum_over_replica(values: Tensor) -> Tensor:
    """Adds ``values`` over the ranks that together hold one model, in place."""
    from megatron.core import parallel_state

    return _sum(values, parallel_state.get_model_parallel_group())


def sum_over_tensor_ranks(values: Tensor) -> Tensor:
    """Adds ``values`` over the ranks that share this rank's layers, in place."""
    from megatron.core import parallel_state

    return _sum(values, parallel_state.get_tensor_model_parallel_group())


def max_over_tensor_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over the ranks that share this rank's layers, in place."""
    from megatron.core import parallel_state

    return _reduce(values, parallel_state.get_tensor_model_parallel_group(), dist.ReduceOp.MAX)


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return _reduce(values, group, dist.ReduceOp.SUM)


def _reduce(values: Tensor, group: dist.ProcessGroup | None, how: dist.ReduceOp.RedOpType) -> Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, how, group=group)
    return values


def gather_objects(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's ``value``, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
