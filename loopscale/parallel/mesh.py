"""Ranks and their groups: torch.distributed and Megatron's parallel_state, started once per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from loopscale.config.tree import ParallelConfig
from loopscale.errors import ClusterError, LoopscaleError, UsageError, describe_fault

Result = TypeVar("Result")


@dataclass(frozen=True)
class Mesh:
    """Where this process stands: its rank, its data-parallel place, and its device."""

    rank: int
    world: int
    data_rank: int
    data_size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that logs."""
        return self.rank == 0


def world_from_environment() -> tuple[int, int]:
    """(rank, world size) as torchrun or a launcher has set them; (0, 1) when none has."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def start(parallel: ParallelConfig) -> Mesh:
    """Joins the process group and builds Megatron's groups; a second call in one process returns the same mesh.

    NCCL for tensors on a GPU, gloo for those on the CPU (the fp64 sums of a step). A single process needs no address:
    its store lives in memory. Raises :class:`ClusterError` when the other ranks cannot be reached.
    """
    from megatron.core import parallel_state

    rank, world = world_from_environment()
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=parallel.timeout)
        try:
            if world == 1:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            else:
                dist.init_process_group(backend, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            raise ClusterError(f"rank {rank} of {world} could not join the others at {where}: {error}") from error
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(parallel.tensor, parallel.pipeline)
    return Mesh(
        rank=rank,
        world=world,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        local_rank=local_rank,
        local_size=local_size,
        device=device,
    )


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or silent: the backends raise plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(sign in text for sign in ("gloo/", "NCCL", "Connection closed", "Timed out"))


def on_main(action: Callable[[], Result]) -> Result:
    """Runs ``action`` on rank 0 and gives its result, or raises its error, on every rank. A collective.

    A fault of the file system is raised as :class:`UsageError` with the path and the reason.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except LoopscaleError as error:
            answer[1] = error
        except OSError as error:
            answer[1] = UsageError(describe_fault(error))
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Adds ``values`` over all ranks, in place; with one rank it costs nothing."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
