"""Saving and loading a run's state by global names, with torch.distributed.checkpoint.

A checkpoint folder holds ``tensors/`` (fp32 weights and optimizer moments as ``kind/global.name``, see ``parts.py``),
``state.json`` (counters and whatever else the run needs to go on), ``config.yaml`` and ``tokenizer.json`` (so that it can
be used alone), and the manifest of ``commit.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loopscale.checkpoint.commit import MANIFEST, File, Manifest, Storage, damage, read_manifest
from loopscale.checkpoint.parts import (
    INDEX,
    PartReader,
    PartWriter,
    Piece,
    PieceLoadPlanner,
    PieceSavePlanner,
    hexadecimal,
    problems,
)
from loopscale.errors import CheckpointError, UsageError
from loopscale.parallel.mesh import gather_objects, on_main, sum_over_ranks

STATE_BYTES = 2**26
"""A ``state.json`` that is larger is none of ours."""


@dataclass(frozen=True)
class Snapshot:
    """What a rank saves of a run at a step. The pieces of all ranks tile every tensor; the rest counts on rank 0."""

    step: int
    pieces: Sequence[Piece]
    state: Mapping[str, Any]
    """``state.json``."""
    files: Mapping[str, str | bytes]
    """Other files, by name."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able, for whoever chooses among checkpoints; see :class:`Manifest`."""

    def copied(self) -> Snapshot:
        """As it is now, in CPU memory of its own: training may go on."""
        state, files = json.loads(json.dumps(self.state)), dict(self.files)
        return Snapshot(self.step, [replace(p, here=p.here.cpu().clone()) for p in self.pieces], state, files, dict(self.facts))


def save(
    storage: Storage,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    interrupt: Callable[[str], None] | None = None,
) -> Manifest:
    """Commits a checkpoint; every rank of ``group`` (None: all) calls it with its own snapshot of the same step.

    Raises :class:`CheckpointError` on every rank alike when any of them fails, a full disk say; what was committed
    before stays. ``interrupt`` is told the stage of the protocol that has just ended (tests kill there).
    """
    import torch.distributed.checkpoint as dcp

    step, notify = snapshot.step, interrupt or (lambda stage: None)
    own = sum(p.here.nbytes for p in snapshot.pieces)
    needed = float(sum_over_ranks(torch.tensor(own, dtype=torch.float64), group))

    def begin() -> None:
        storage.begin(step)
        if (free := storage.free()) < needed:
            raise OSError(f"it needs {needed / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free")

    def finish() -> Manifest:
        place, files = storage.writing(step), {**snapshot.files, "state.json": json.dumps(snapshot.state, indent=1)}
        for name, content in files.items():
            (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
        small = [File.of(place, name) for name in (*files, INDEX)]
        manifest = Manifest((*writer.written, *small), snapshot.facts)
        (place / MANIFEST).write_text(manifest.dump())
        for file in small:
            storage.deliver(step, file.name)
        notify("written")
        storage.publish(step)
        notify("committed")
        return manifest

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        on_main(begin, group)
        notify("begun")
        writer = PartWriter(storage, step)
        dcp.save({}, storage_writer=writer, planner=PieceSavePlanner(snapshot.pieces), process_group=group)
        notify("tensors")
        return on_main(finish, group)
    except (UsageError, dcp.api.CheckpointException) as error:  # the latter of BaseException; both on every rank
        cause = str(error) if isinstance(error, UsageError) else _first(error)
        on_main(lambda: storage.abandon(step), group)
        raise CheckpointError(f"checkpoint of step {step} could not be saved: {cause}") from None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The counters of a verified checkpoint."""
    path = checkpoint / "state.json"
    try:
        if (size := path.stat().st_size) > STATE_BYTES:
            raise ValueError(f"it has {size} bytes")
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: state.json cannot be read ({error})") from None


def load(checkpoint: Path, pieces: Sequence[Piece], elsewhere: Collection[str] = ()) -> None:
    """Fills ``pieces`` from a verified checkpoint; tensors named ``elsewhere`` are other ranks'.

    Raises :class:`CheckpointError` that lists every name that is missing and every shape that differs.
    """
    import torch.distributed.checkpoint as dcp

    reader = PartReader(checkpoint)
    if found := problems(reader.index, pieces, elsewhere):
        shown = "; ".join(found[:6]) + (f"; and {len(found) - 6} more" if len(found) > 6 else "")
        raise CheckpointError(f"checkpoint {checkpoint} does not fit the model: {shown}")
    try:
        dcp.load({}, storage_reader=reader, planner=PieceLoadPlanner(pieces), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"checkpoint {checkpoint} could not be read: {_first(error)}") from None


def load_whole(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a verified checkpoint, on the CPU."""
    index = PartReader(checkpoint).index
    tensors = {name: torch.empty(stored.shape) for name, stored in index.items()}
    load(checkpoint, [Piece(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()])
    return tensors


def compare_digests(checkpoint: Path, pieces: Sequence[Piece]) -> None:
    """Raises :class:`CheckpointError` where what has been loaded is not what was saved; ``pieces`` are those that this rank
    would save. A collective."""
    index = PartReader(checkpoint).index
    rows = {name: row for row, name in enumerate(index)}
    found = torch.zeros(len(index), 2, dtype=torch.int64)  # digest and number of elements
    for piece in pieces:
        found[rows[piece.name]] += torch.stack((piece.digest().cpu(), torch.tensor(piece.here.numel())))
    for (name, stored), (digest, elements) in zip(index.items(), sum_over_ranks(found).tolist(), strict=True):
        if elements and (elements != stored.elements or hexadecimal(digest) != stored.digest):
            raise CheckpointError(
                f"{name} is not what {checkpoint} holds, once it is loaded; please report this fault of loopscale"
            )


def newest_whole(storage: Storage, on_damage: str, cache: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that passes verification, and a sentence for each one passed over. A collective.

    With ``on_damage`` "stop" the first damaged one raises :class:`CheckpointError` instead.
    """
    passed_over: list[str] = []
    for step in on_main(storage.steps):
        checkpoint = on_main(partial(storage.fetch, step, cache))
        try:
            verify(checkpoint)
        except CheckpointError as error:
            if on_damage == "stop":
                raise
            passed_over.append(str(error))
        else:
            return checkpoint, passed_over
    return None, passed_over


def verify(checkpoint: Path) -> None:
    """Reads every file against the manifest, each rank a share of them; raises :class:`CheckpointError` that names the first
    damaged one, on every rank alike. A collective."""
    manifest = on_main(lambda: read_manifest(checkpoint))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = sorted(manifest.files, key=lambda f: f.size)[rank::world]
    found = [d for d in gather_objects(damage(checkpoint, own)) if d]
    if found:
        raise CheckpointError(found[0])


def _first(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    rank, (cause, _) = next(iter(failures.items())) if failures else (0, (error, None))
    return f"rank {rank}: {cause}"
