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

from loopscale.checkpoint.commit import MANIFEST, File, Manifest, Storage, damage, read_manifest, read_small
from loopscale.checkpoint.parts import (
    INDEX,
    PartReader,
    PartWriter,
    Piece,
    PieceSavePlanner,
    hexadecimal,
    problems,
    read_index,
)
from loopscale.config.load import parse_yaml
from loopscale.errors import CheckpointError, LoopscaleError, UsageError
from loopscale.parallel.mesh import gather_objects, on_main, sum_over_ranks

STATE_BYTES, CONFIG_BYTES = 2**24, 2**18
"""A ``state.json`` or a ``config.yaml`` that is larger is none of ours."""


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
        pieces = [replace(p, here=p.here.to("cpu", copy=True)) for p in self.pieces]
        return Snapshot(self.step, pieces, json.loads(json.dumps(self.state)), dict(self.files), dict(self.facts))


def save(
    storage: Storage,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    keep_parts: bool = False,
    interrupt: Callable[[str], None] | None = None,
) -> Manifest:
    """Commits a checkpoint; every rank of ``group`` (None: all) calls it with its own snapshot of the same step.

    Raises :class:`CheckpointError` on every rank alike when any of them fails, a full disk say; what was committed
    before stays. With ``keep_parts`` the parts of the same snapshot that a killed save left, where ``storage`` has not removed
    them, are read and not written again. ``interrupt`` is told the stage of the protocol that has just ended (tests kill there).
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
        writer = PartWriter(storage, step, keep_parts)
        dcp.save({}, storage_writer=writer, planner=PieceSavePlanner(snapshot.pieces), process_group=group)
        notify("tensors")
        return on_main(finish, group)
    except (LoopscaleError, dcp.api.CheckpointException) as error:  # the latter of BaseException; both on every rank
        cause = str(error) if isinstance(error, LoopscaleError) else _first(error)
        on_main(lambda: storage.abandon(step), group)
        raise CheckpointError(f"checkpoint of step {step} could not be saved: {cause}") from None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """``state.json`` of a verified checkpoint; what is in it is the run's business."""
    try:
        content = json.loads(read_small(checkpoint, "state.json", STATE_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: state.json cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: state.json does not hold keys and values")
    return content


def load_config(checkpoint: Path) -> dict[str, Any]:
    """``config.yaml`` of a verified checkpoint as plain values, not validated."""
    text = read_small(checkpoint, "config.yaml", CONFIG_BYTES)
    try:
        content = parse_yaml(text.decode(), "config.yaml", aliases=False)
    except (UnicodeDecodeError, UsageError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: config.yaml does not hold keys and values")
    return content


def load(checkpoint: Path, pieces: Sequence[Piece], elsewhere: Collection[str] = ()) -> None:
    """Fills ``pieces`` from a verified checkpoint; tensors named ``elsewhere`` are other ranks'.

    Raises :class:`CheckpointError` that lists every name that is missing and every shape that differs.
    """
    reader = PartReader(checkpoint)
    _raise_problems(checkpoint, problems(reader.index, {p.name: p.shape for p in pieces}, elsewhere))
    reader.read(pieces)


def require_shapes(checkpoint: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """As :func:`load` of whole tensors would, raises :class:`CheckpointError` for those that are missing or differ."""
    _raise_problems(checkpoint, problems(read_index(checkpoint), shapes))


def _raise_problems(checkpoint: Path, found: Sequence[str]) -> None:
    if found:
        shown = "; ".join(found[:6]) + (f"; and {len(found) - 6} more" if len(found) > 6 else "")
        remedy = "use the configuration that it was saved with, or a checkpoint that no other program has changed"
        raise CheckpointError(f"checkpoint {checkpoint} does not fit the model: {shown}; {remedy}")


def load_whole(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a verified checkpoint, on the CPU."""
    index = read_index(checkpoint)
    tensors = {name: torch.empty(stored.shape) for name, stored in index.items()}
    load(checkpoint, [Piece(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()])
    return tensors


def compare_digests(checkpoint: Path, pieces: Sequence[Piece], add: Callable[[Tensor], Tensor] = sum_over_ranks) -> None:
    """Raises :class:`CheckpointError` where what has been loaded is not what was saved; ``pieces`` are those that this rank
    would save, and ``add`` sums over the ranks that do. A collective."""
    index = read_index(checkpoint)
    rows = {name: row for row, name in enumerate(index)}
    found = torch.zeros(len(index), 2, dtype=torch.int64)  # digest and number of elements
    for piece in pieces:
        found[rows[piece.name]] += torch.stack((piece.digest().cpu(), torch.tensor(piece.here.numel())))
    for (name, stored), (digest, elements) in zip(index.items(), add(found).tolist(), strict=True):
        if elements and (elements != stored.elements or hexadecimal(digest) != stored.digest):
            raise CheckpointError(
                f"{name} is not what {checkpoint} holds, once it is loaded: its index is wrong, or this is a fault of loopscale"
            )


def newest_whole(
    storage: Storage, on_damage: str, cache: Path, group: dist.ProcessGroup | None = None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that passes verification, and a sentence for each one passed over. A collective of ``group``.

    With ``on_damage`` "stop" the first damaged one raises :class:`CheckpointError` instead.
    """
    passed_over: list[str] = []
    for step in on_main(storage.steps, group):
        checkpoint = on_main(partial(storage.fetch, step, cache), group)
        try:
            verify(checkpoint, group)
        except CheckpointError as error:
            if on_damage == "stop":
                raise
            passed_over.append(str(error))
        else:
            return checkpoint, passed_over
    return None, passed_over


def verify(checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Reads every file against the manifest, each rank a share of them; raises :class:`CheckpointError` that names the first
    damaged one, on every rank alike. A collective of ``group``."""
    manifest = on_main(lambda: read_manifest(checkpoint), group)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = sorted(manifest.files, key=lambda f: f.size)[rank::world]
    found = [d for d in gather_objects(damage(checkpoint, own), group) if d]
    if found:
        raise CheckpointError(found[0])


def _first(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    rank, (cause, _) = next(iter(failures.items())) if failures else (0, (error, None))
    return f"rank {rank}: {str(cause) or type(cause).__name__}"
