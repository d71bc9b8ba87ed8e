"""Saving and loading a run's state by global names, with torch.distributed.checkpoint.

A checkpoint folder holds ``tensors/`` (fp32 weights and both Adam moments, each under ``kind/global.name`` with its
global shape), ``state.json`` (counters and whatever else the run needs to go on), ``config.yaml`` and ``tokenizer.json``
(so that it can be used alone), and the manifest of ``commit.py``.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from loopscale.checkpoint import commit
from loopscale.errors import CheckpointError, UsageError
from loopscale.parallel.mesh import on_main, sum_over_ranks

Tensors = Mapping[str, Tensor]


def save(
    checkpoints: Path,
    step: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    files: Mapping[str, str | bytes],
    *,
    interrupt: Callable[[str], None] | None = None,
) -> Path:
    """Commits a checkpoint of ``step``; every rank calls it, with its stage's ``tensors``, whole.

    Raises :class:`CheckpointError` on every rank alike when any of them fails, a full disk say; what was committed
    before stays. ``interrupt`` is told the stage of the protocol that has just ended (tests kill there).
    """
    import torch.distributed.checkpoint as dcp

    notify = interrupt or (lambda stage: None)
    place = commit.folder(checkpoints, step).with_name(f"step-{step}.writing")
    own = sum(t.numel() * t.element_size() for t in tensors.values())  # the same on all ranks of a stage
    ranks_a_stage = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    needed = float(sum_over_ranks(torch.tensor(own, dtype=torch.float64))) / ranks_a_stage

    def begin() -> None:
        commit.begin(checkpoints, step)
        if (free := shutil.disk_usage(place).free) < needed:
            raise OSError(f"it needs {needed / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free")

    def finish() -> None:
        (place / "state.json").write_text(json.dumps(state, indent=1))
        for name, content in files.items():
            (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
        notify("written")
        commit.commit(place)
        notify("committed")

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        on_main(begin)
        notify("begun")
        dcp.save(dict(tensors), checkpoint_id=place / "tensors")
        notify("tensors")
        on_main(finish)
    except (UsageError, dcp.api.CheckpointException) as error:  # the latter of BaseException; both on every rank
        cause = str(error) if isinstance(error, UsageError) else _first(error)
        on_main(lambda: shutil.rmtree(place, ignore_errors=True))
        raise CheckpointError(f"checkpoint of step {step} could not be saved: {cause}") from None
    return commit.folder(checkpoints, step)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The counters of a verified checkpoint."""
    return json.loads((checkpoint / "state.json").read_text())


def load_tensors(checkpoint: Path, shapes: Mapping[str, tuple[int, ...]], elsewhere: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors named by ``shapes``, whole, fp32, on the CPU; those named ``elsewhere`` are other stages'.

    Raises :class:`CheckpointError` that lists every name that is missing and every shape that differs.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint / "tensors")
    stored = {name: tuple(m.size) for name, m in reader.read_metadata().state_dict_metadata.items() if hasattr(m, "size")}
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [
        f"{n} has shape {list(stored[n])}, the model {list(s)}" for n, s in shapes.items() if n in stored and stored[n] != s
    ]
    kinds = {name.split("/")[0] for name in shapes}
    known = {*shapes, *elsewhere}
    problems += [f"{name} is not in the model" for name in stored if name.split("/")[0] in kinds and name not in known]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise CheckpointError(f"checkpoint {checkpoint} does not fit the model: {shown}")
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"checkpoint {checkpoint} could not be read: {_first(error)}") from None
    return tensors


def newest_whole(checkpoints: Path, on_damage: str) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that passes verification, and a sentence for each one passed over.

    With ``on_damage`` "stop" the first damaged one raises instead.
    """
    passed_over = []
    for checkpoint in commit.committed(checkpoints):
        try:
            commit.verify(checkpoint)
        except CheckpointError as error:
            if on_damage == "stop":
                raise
            passed_over.append(str(error))
        else:
            return checkpoint, passed_over
    return None, passed_over


def _first(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    rank, (cause, _) = next(iter(failures.items())) if failures else (0, (error, None))
    return f"rank {rank}: {cause}"
