"""Stages of toy models on real ranks, saved and loaded by Megatron and by DeepSpeed themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from unittest.mock import patch

import torch
from torch import Tensor

from loopscale.config import Config
from loopscale.convert.formats.megatron import sharded_state_dict
from loopscale.model.stage import LoopedStage
from loopscale.model.weights import holders
from loopscale.parallel.mesh import Mesh
from tests.convert.toys import LENGTH, config, weights


def slices(of: Config, stages: int) -> tuple[int, ...]:
    """Core layers of each stage: home has one, the last has the rest."""
    return (of.model.core_layers,) if stages == 1 else (1, *[0] * (stages - 2), of.model.core_layers - 1)


def built(mesh: Mesh, of: Config) -> LoopedStage:
    """This rank's stage, every element NaN, padding too."""
    stage = LoopedStage(of.model, LENGTH, seed=0, place=mesh.place(slices(of, mesh.stages)), initialise=False)
    for parameter in stage.parameters():
        parameter.data.fill_(torch.nan)
    return stage


def filled(mesh: Mesh, of: Config) -> LoopedStage:
    stage, ours = built(mesh, of), weights(of, spread=0.12)
    for holder, parameter in stage.held():
        stage.fill(holder, parameter, ours)
    return stage


def parameters(stage: LoopedStage) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}


def expected(of: Config, found: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """What tensor-parallel rank ``rank`` of ``size`` must have of the parameters in ``found``; zeros in the padding."""
    ours, held = weights(of, spread=0.12), {name: torch.zeros(p.shape) for name, p in found.items()}
    for holder in holders(of.model, LENGTH):
        if holder.parameter in held:
            for box, here in holder.views(held[holder.parameter], rank, size):
                spans = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                here.copy_(ours[box.weight.name][spans])
    return held


@contextmanager
def megatron_here() -> Iterator[None]:
    """Megatron's saving writes `torch.cuda` where it means "here", and starts a process for a queue."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: Queue = Queue()
    with (
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(filesystem_async, "_get_write_results_queue", lambda: results),
    ):
        yield


def save_by_megatron(stage: LoopedStage, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True, exist_ok=True)
    with megatron_here():
        dist_checkpointing.save(sharded_state_dict(stage), str(folder))


def load_by_megatron(stage: LoopedStage, folder: Path) -> None:
    """Strictly."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with megatron_here():
        found = dist_checkpointing.load(sharded_state_dict(stage), str(folder), strict=StrictHandling.RAISE_ALL)
    stage.load_state_dict(found)


def through_megatron(mesh: Mesh, theirs: Path, saved: Path, names: Sequence[str]) -> list[dict[str, Tensor]]:
    """Loads toys from ``theirs``, and saves them anew from there; returns the parameters that each gave."""
    found = []
    for name in names:
        stage = built(mesh, config(name))
        load_by_megatron(stage, theirs / name)
        save_by_megatron(stage, saved / name)
        found.append(parameters(stage))
    return found


def save_by_deepspeed(mesh: Mesh, folder: Path, zero_stage: int, names: Sequence[str]) -> list[dict[str, Tensor]]:
    """Saves toys after a step; returns the parameters that each had."""
    from loopscale.parallel.zero import _initialize

    found = []
    for name in names:
        stage = filled(mesh, config(name))
        adam = torch.optim.AdamW(stage.parameters(), lr=0.01)
        engine = _initialize(stage, adam, zero_stage, None, False)
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        engine.step()
        engine.save_checkpoint(str(folder / name))
        found.append(parameters(stage))
    return found
