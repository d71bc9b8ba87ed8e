"""A checkpoint written anew in another number of parts: one process, no ranks, a bounded amount of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Folder, Manifest, read_small
from loopscale.checkpoint.inspect import verified
from loopscale.checkpoint.parts import PartReader, Piece, StoredTensor, read_index
from loopscale.corpus.progress import Progress
from loopscale.durable import sync, sync_tree
from loopscale.errors import CheckpointError, UsageError

LEAST_MEMORY = 2**24
"""Bytes, an eighth of which is a box."""


def reshard(
    checkpoint: Path, out: Path, parts: int, progress: Progress, *, memory: int = 2**30, weights_only: bool = False
) -> Manifest:
    """Writes the checkpoint at ``checkpoint`` to ``out`` in ``parts`` parts of nearly equal size, whole rows of tensors in each.

    All else is copied; with ``weights_only`` optimizer moments are left out. ``out`` appears whole or not at all, and holds
    the same elements as ``checkpoint``: their digests are compared. Takes less than ``memory`` bytes beside the index, as
    long as a row of a tensor takes less than an eighth of that.

    Raises :class:`UsageError` for arguments that cannot be, :class:`CheckpointError` when the checkpoint is damaged or
    ``out`` cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} already exists; name a folder that does not")
    if not 1 <= parts <= 99_999:
        raise UsageError(f"--parts is {parts}, must be from 1 to 99999")
    if memory < LEAST_MEMORY:
        raise UsageError(f"--memory is {memory} bytes, must be at least {LEAST_MEMORY // 2**20}MiB")
    manifest, reader = verified(checkpoint, progress), PartReader(checkpoint)
    index = {n: t for n, t in reader.index.items() if not weights_only or n.startswith("weight/")}
    total, done = 4 * sum(t.elements for t in index.values()), 0

    def told(size: int) -> None:
        nonlocal done
        done += size
        progress.update("writing", done, total)

    pieces = [
        _Distant(name, index[name].shape, offsets, torch.empty(sizes, device="meta"), part, reader=reader, told=told)
        for name, offsets, sizes, part in _cut(index, parts, memory // 8 // 4)
    ]
    if (filled := len({piece.part for piece in pieces})) < parts:
        raise UsageError(f"--parts is {parts}, and the rows of the tensors fill {filled} of them; use fewer")
    others = [f.name for f in manifest.files if not f.name.startswith("tensors/") and f.name != "state.json"]
    files, state = {name: read_small(checkpoint, name, memory // 4) for name in others}, store.load_state(checkpoint)
    progress.update("writing", 0, total)
    snapshot, storage = store.Snapshot(state.get("step", 0), pieces, state, files, manifest.facts), _Out(out, index)
    try:
        return store.save(storage, snapshot)
    finally:  # also when it is interrupted
        storage.abandon(snapshot.step)


def _cut(
    index: Mapping[str, StoredTensor], parts: int, largest: int
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Boxes of whole rows that tile all tensors, laid end to end: (name, offsets, sizes, part).

    A part begins at the row that is nearest to its share; no box has more than ``largest`` elements, one row aside.
    """
    total, at, part = sum(t.elements for t in index.values()), 0, 0
    for name, tensor in index.items():
        rows, width, row = tensor.shape[0], math.prod(tensor.shape[1:]), 0
        while row < rows:
            begin_of_next = round((total * (part + 1) / parts - at) / width)
            if begin_of_next <= row:
                part += 1
                continue
            height = min(rows, begin_of_next, row + max(1, largest // width)) - row
            yield name, (row, 0)[: len(tensor.shape)], (height, *tensor.shape[1:]), part
            row += height
        at += rows * width


@dataclass(frozen=True, kw_only=True)
class _Distant(Piece):
    """A piece that is read from another checkpoint when it is asked for; ``here`` has a shape only."""

    reader: PartReader
    told: Callable[[int], None]
    """Hears of bytes that have been read."""

    def read(self) -> Tensor:
        values = torch.empty(self.here.shape)
        self.reader.read([Piece(self.name, self.shape, self.offsets, values)])
        self.told(values.nbytes)
        return values


class _Out(Folder):
    """One checkpoint at a path of its own, whose tensors must be those of ``index``."""

    def __init__(self, out: Path, index: Mapping[str, StoredTensor]):
        super().__init__(out.parent)
        self._out, self._index = out, index

    def begin(self, step: int) -> None:
        self.abandon(step)
        (self.writing(step) / "tensors").mkdir(parents=True)

    def writing(self, step: int) -> Path:
        return self.folder / f"writing-{self._out.name}"  # not a name that a run at work here would clear away

    def publish(self, step: int) -> None:
        writing = self.writing(step)
        for name, tensor in read_index(writing).items():
            if tensor.digest != self._index[name].digest:
                raise CheckpointError(f"the elements of {name} are not those that its digest was taken of")
        sync_tree(writing)
        writing.rename(self._out)
        sync(self.folder)
