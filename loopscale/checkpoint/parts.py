"""Global tensors in files: boxes of them in safetensors files, some a rank, and an index of the boxes in JSON.

torch.distributed.checkpoint plans who writes what and which boxes are read; the files are safetensors rather than its
pickles, so that reading a checkpoint never executes anything, and any tool can look into one. The index is
``tensors/index.json``:

    {"weight/core.0.q": {"shape": [64, 64], "digest": "0f…", "boxes": [
        {"file": "rank-00000-000.safetensors", "offsets": [0, 0], "sizes": [32, 64]}, …]}}

and in that file the box is the fp32 tensor ``weight/core.0.q[0:32,0:64]``. The digest is that of ``diagnostics/digest.py``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from loopscale.checkpoint.commit import File, Storage, read_manifest, read_small
from loopscale.diagnostics.digest import element_digest
from loopscale.durable import replacing, write_json
from loopscale.errors import CheckpointError

INDEX = "tensors/index.json"
INDEX_BYTES = 2**26
"""An index that is larger is none of ours: some 500,000 boxes."""
FILE_BYTES = 2**29
"""Largest file, boxes that are larger aside."""
AT_ONCE = 2**20
"""Bytes handed to the disk in one call: with 16 times as many Linux took five times as long for all of them."""


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, fp32, and where it lies here.

    ``name`` is ``kind/global.name`` and ``shape`` the global shape; the box begins at ``offsets`` and has the shape of
    ``here``, which is read when saving and written when loading.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    here: Tensor
    part: int | None = None
    """In whose files it is saved; None: in those of the rank that has it."""

    def read(self) -> Tensor:
        """Its values; what is not here yet is fetched."""
        return self.here

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.here.shape)

    def digest(self) -> Tensor:
        """Its share of the tensor's digest, an int64 scalar."""
        return element_digest(self.here, self.shape, self.offsets)


class StoredBox(BaseModel):
    """A box of a tensor and the file that has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Annotated[str, Field(pattern=r"^rank-\d{5}-\d{3,6}\.safetensors$")]
    offsets: tuple[Annotated[int, Field(ge=0)], ...]
    sizes: tuple[Annotated[int, Field(ge=1)], ...]

    def key(self, name: str) -> str:
        """Its name in the file."""
        spans = (f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes, strict=True))
        return f"{name}[{','.join(spans)}]"


class StoredTensor(BaseModel):
    """A global tensor, fp32."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=2)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    boxes: tuple[StoredBox, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def metadata(self) -> TensorStorageMetadata:
        """As torch's planners have it."""
        chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.boxes]
        return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(self.shape), chunks)


Name = Annotated[str, Field(pattern=r"^[a-z_]+/[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=1000)]
"""``kind/global.name``."""
_INDEX = TypeAdapter(dict[Name, StoredTensor])


def read_index(checkpoint: Path) -> dict[str, StoredTensor]:
    """The tensors of a verified checkpoint and where their boxes are.

    Raises :class:`CheckpointError` when the index is not one, when the boxes of a tensor are not all of it, each element
    once, or when their files are not of the checkpoint or too small for them.
    """
    damaged = f"checkpoint {checkpoint.name} is damaged: {INDEX}"
    try:
        index = _INDEX.validate_json(read_small(checkpoint, INDEX, INDEX_BYTES))
    except ValidationError as error:
        raise CheckpointError(f"{damaged} cannot be read ({error.error_count()} mistakes in it)") from None
    room = {file.name: file.size for file in read_manifest(checkpoint).files}
    for name, tensor in index.items():
        for box in tensor.boxes:
            if len(box.offsets) != len(tensor.shape) or len(box.sizes) != len(tensor.shape):
                raise CheckpointError(f"{damaged}: a box of {name} has other axes")
            if any(o + n > whole for o, n, whole in zip(box.offsets, box.sizes, tensor.shape, strict=True)):
                raise CheckpointError(f"{damaged}: a box of {name} lies outside of it")
            if (file := f"tensors/{box.file}") not in room:
                raise CheckpointError(f"{damaged}: a box of {name} is in {box.file}, which the manifest does not list")
            room[file] -= 4 * math.prod(box.sizes)
            if room[file] < 0:
                raise CheckpointError(f"{damaged}: {box.file} is too small for the boxes in it")
        if (found := sum(math.prod(b.sizes) for b in tensor.boxes)) != tensor.elements:
            raise CheckpointError(f"{damaged}: boxes of {name} have {found} of {tensor.elements} elements")
        if not tile(tensor.shape, [(box.offsets, box.sizes) for box in tensor.boxes]):
            raise CheckpointError(f"{damaged}: boxes of {name} overlap")
    return index


def tile(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes, offsets and sizes, that lie within a tensor and have as many elements as it has each element once.

    They do when every corner of a box is a corner of another one too, or of the tensor, an even number in all: only then is
    the number of boxes odd that an element is in, so it is in one at least, and there are no elements left for a second.
    """
    odd = set[tuple[int, ...]]()
    whole = [(0, n) for n in shape]
    for spans in (whole, *([(o, o + n) for o, n in zip(offsets, sizes, strict=True)] for offsets, sizes in boxes)):
        odd.symmetric_difference_update(itertools.product(*spans))
    return not odd


class PieceSavePlanner(DefaultSavePlanner):
    """Saves the pieces that each rank gives; torch's planner checks that together they tile every tensor."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = {p.index: p for p in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(p) for p in self.pieces.values()])
        return self.plan

    def _item(self, piece: Piece) -> WriteItem:
        data = TensorWriteData(piece.chunk, TensorProperties(torch.float32), torch.Size(piece.shape))
        return WriteItem(piece.index, WriteItemType.SHARD, tensor_data=data)


class PartWriter(StorageWriter):
    """Writes each rank's boxes of the checkpoint of ``step`` into files of its own, on disk to the last byte, and rank 0 the
    index.

    On rank 0 :attr:`written` then has the files of all ranks. A file's digest is taken by the rank that wrote it. ``keep``: a
    file that is there is one that a killed save of the same pieces wrote, and stays.
    """

    def __init__(self, storage: Storage, step: int, keep: bool = False):
        self._storage, self._step, self._keep = storage, step, keep
        self.written: tuple[File, ...] = ()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, PieceSavePlanner)
        results = list[WriteResult]()
        for name, pieces in _files(plan.storage_data, [planner.pieces[item.index] for item in plan.items]):
            results += self._write(name, pieces)
            self._storage.deliver(self._step, f"tensors/{name}")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, name: str, pieces: Sequence[Piece]) -> list[WriteResult]:
        """A safetensors file, one box in memory at a time; its digest is taken meanwhile of what is handed to the disk."""
        boxes = [StoredBox(file=name, offsets=piece.offsets, sizes=tuple(piece.here.shape)) for piece in pieces]
        path = self._storage.writing(self._step) / "tensors" / name
        if self._keep and path.is_file():
            return self._found(path, pieces, boxes)
        head = safetensors_head((box.key(p.name), "F32", box.sizes, p.here.nbytes) for p, box in zip(pieces, boxes, strict=True))
        size, sha256 = len(head) + sum(p.here.nbytes for p in pieces), hashlib.sha256(head)
        with replacing(path) as out, ThreadPoolExecutor(1) as beside:
            out.write(head)
            digests = [_put(piece, out, sha256, beside) for piece in pieces]
        return _results(pieces, boxes, digests, File(f"tensors/{name}", size, sha256.hexdigest()))

    def _found(self, path: Path, pieces: Sequence[Piece], boxes: Sequence[StoredBox]) -> list[WriteResult]:
        """As :meth:`_write`, of a file that is whole."""
        with safe_open(path, "pt") as source:
            digests = [
                int(element_digest(source.get_tensor(box.key(piece.name)), piece.shape, piece.offsets))
                for piece, box in zip(pieces, boxes, strict=True)
            ]
        return _results(pieces, boxes, digests, File.of(path.parents[1], f"tensors/{path.name}"))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        boxes, digests, files = dict[str, list[StoredBox]](), dict[str, int](), dict[str, File]()
        for result in (r for own in results for r in own):
            name, stored = result.index.fqn, result.storage_data
            boxes.setdefault(name, []).append(stored.box)
            digests[name] = digests.get(name, 0) + stored.digest
            files[stored.file.name] = stored.file
        index = {}
        for name, own in boxes.items():
            shape = metadata.state_dict_metadata[name].size  # type: ignore[union-attr]
            index[name] = StoredTensor(shape=tuple(shape), digest=hexadecimal(digests[name]), boxes=tuple(own)).model_dump()
        write_json(self._storage.writing(self._step) / INDEX, index)
        self.written = tuple(files.values())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _results(pieces: Sequence[Piece], boxes: Sequence[StoredBox], digests: Sequence[int], file: File) -> list[WriteResult]:
    return [
        WriteResult(piece.index, piece.here.nbytes, _Stored(box, digest, file))
        for piece, box, digest in zip(pieces, boxes, digests, strict=True)
    ]


def safetensors_head(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None) -> bytes:
    """All of a safetensors file but the data that follow, of tensors given as name, type, shape and bytes in their order."""
    header, end = dict[str, Any]({"__metadata__": metadata} if metadata else {}), 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # data are aligned
    return len(head).to_bytes(8, "little") + head


def _put(piece: Piece, out: BinaryIO, sha256: Any, beside: Executor) -> int:
    """Writes the elements of a piece; returns their digest, and lets ``sha256`` go on with them meanwhile."""
    values = piece.read()
    flat = values.cpu().contiguous().view(-1).numpy().data.cast("B")
    hashed = beside.submit(sha256.update, flat)
    digest = int(element_digest(values, piece.shape, piece.offsets))
    for at in range(0, len(flat), AT_ONCE):
        out.write(flat[at : at + AT_ONCE])
    hashed.result()
    return digest


class PartReader:
    """Reads boxes, or parts of boxes, of a verified checkpoint."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        self.index = read_index(checkpoint)
        self._stored = {name: tensor.metadata() for name, tensor in self.index.items()}

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fills pieces of tensors that the index has, of the shape that it says, and reads only what they need.

        Raises :class:`CheckpointError` where a part does not hold what the index promises.
        """
        own = dict[str, list[Piece]]()
        for piece in pieces:
            own.setdefault(piece.name, []).append(piece)
        by_file = dict[str, list[tuple[str, ReadItem]]]()
        for name, wanted in own.items():
            for item in create_read_items_for_chunk_list(name, self._stored[name], [p.chunk for p in wanted]):
                by_file.setdefault(self._box(name, item).file, []).append((name, item))
        for file, items in by_file.items():
            with self._opened(file) as source:
                for name, item in items:
                    part = stored_slice(source, self._box(name, item), name)
                    here = own[name][item.dest_index.index].here  # type: ignore[index]  # it numbers what it was given
                    here[_spans(item.dest_offsets, item.lengths)].copy_(part[_spans(item.storage_offsets, item.lengths)])

    def _box(self, name: str, item: ReadItem) -> StoredBox:
        return self.index[name].boxes[item.storage_index.index]  # type: ignore[index]

    def _opened(self, file: str) -> Any:
        """A part, open; its data are read where they are asked for."""
        try:
            return safe_open(self._checkpoint / "tensors" / file, "pt")
        except (OSError, SafetensorError) as error:
            place = f"checkpoint {self._checkpoint.name} is damaged: tensors/{file}"
            raise CheckpointError(f"{place} cannot be read ({error})") from None


def _spans(offsets: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))


def stored_slice(source: Any, box: StoredBox, name: str) -> Any:
    """A box in an open part, to be indexed; raises :class:`CheckpointError` where the part does not have it as the index says."""
    try:
        part = source.get_slice(box.key(name))
    except SafetensorError as error:
        raise CheckpointError(f"tensors/{box.file} does not have {box.key(name)}, which {INDEX} promises ({error})") from None
    if part.get_dtype() != "F32" or tuple(part.get_shape()) != box.sizes:
        found = f"{part.get_dtype()} {list(part.get_shape())}"
        raise CheckpointError(f"tensors/{box.file} has {box.key(name)} as {found}, {INDEX} says F32 {list(box.sizes)}")
    return part


def problems(
    index: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], elsewhere: Collection[str] = ()
) -> list[str]:
    """What keeps tensors of these ``shapes`` from being read: names that are missing, other shapes, and names of the same
    kinds that are neither wanted nor ``elsewhere``."""
    found = [f"{name} is missing" for name in shapes if name not in index]
    found += [
        f"{n} has shape {list(index[n].shape)}, the model {list(s)}"
        for n, s in shapes.items()
        if n in index and index[n].shape != s
    ]
    kinds = {name.split("/")[0] for name in shapes}
    known = {*shapes, *elsewhere}
    return found + [f"{name} is not in the model" for name in index if name.split("/")[0] in kinds and name not in known]


def hexadecimal(digest: int) -> str:
    """A sum of element digests, mod 2⁶⁴, as the index has it."""
    return f"{digest % 2**64:016x}"


def _files(rank: int, pieces: Iterable[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    """The names of a rank's files, and what goes into them: pieces in order, as many in a file as it may hold."""
    for part, own in itertools.groupby(pieces, lambda piece: rank if piece.part is None else piece.part):
        for number, batch in enumerate(_batches(own)):
            yield f"rank-{part:05d}-{number:03d}.safetensors", batch


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, held = list[Piece](), 0
    for piece in pieces:
        if batch and held + piece.here.nbytes > FILE_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += piece.here.nbytes
    if batch:
        yield batch


@dataclass(frozen=True)
class _Stored:
    """What rank 0 is told of a box that was written."""

    box: StoredBox
    digest: int
    file: File
