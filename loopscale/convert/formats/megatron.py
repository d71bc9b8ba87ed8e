"""A distributed checkpoint of Megatron-core, of the format torch_dist: what `megatron.core.dist_checkpointing` saves of a stage
of ours (:func:`sharded_state_dict`) on any number of ranks, and loads into one on any other.

Tensors are global, under the names of the stage's parameters (see ``stage.py``), as Megatron gives them: `linear_qkv` by
key/value group, `linear_fc1` with all rows of the gate above all of up, whoever held them. `.metadata` says which boxes of a
tensor lie where in the files `__RANK_N.distcp`, each box as `torch.save` writes it. What layers say beside their weights
(`…._extra_state/shard_0_1`) is written as Megatron's own layers say it, and passed over by name in reading.

`.metadata` is a pickle: of the classes in it those of torch that hold numbers and names are made, and no others. `common.pt`
holds what is no tensor of the model, and is not opened.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from loopscale.checkpoint.commit import read_small
from loopscale.checkpoint.parts import tile
from loopscale.config import Config
from loopscale.convert.formats.stage import StageFormat, extra_states, passed_over
from loopscale.convert.tensors import Planned, Source, reason, shards
from loopscale.durable import replacing, write_json
from loopscale.errors import CheckpointError
from loopscale.model.stage import LoopedStage

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"
METADATA_BYTES = 2**28
"""Metadata that are larger are none of a model of ours: some 500,000 boxes."""
WRITTEN = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
INERT = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")  # Megatron keeps the plans of its ranks there
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("Size", "float32", "bfloat16", "float16")),
}  # fmt: skip
"""What `.metadata` may ask for: nothing here does more than hold what it is given."""


class Megatron(StageFormat):
    name: ClassVar = "megatron"

    def recognises(self, place: Path) -> bool:
        return (place / METADATA).is_file() and (place / BACKEND).is_file()

    def source(self, place: Path, config: Config) -> Source:
        return Boxes(place, passed_over(config.model))

    def write(
        self, folder: Path, config: Config, tensors: Sequence[Planned], dtype: torch.dtype, shard_bytes: int
    ) -> Iterator[int]:
        with replacing(folder / "__0_0.distcp") as out:
            length = out.write(_saved([None]))  # as Megatron packs it
        places = {_object(name): _StorageInfo("__0_0.distcp", 0, length) for name in extra_states(config.model)}
        for number, shard in enumerate(shards(tensors, dtype.itemsize, shard_bytes), 1):
            file, end = f"__0_{number}.distcp", 0
            if not (folder / file).exists():
                with replacing(folder / file) as out:
                    for tensor in shard:
                        values = tensor.make().to(dtype).contiguous()
                        assert tuple(values.shape) == tensor.shape, tensor.name
                        out.write(_saved(values))
                        yield values.nbytes
            else:
                yield sum(math.prod(t.shape) for t in shard) * dtype.itemsize
            for tensor in shard:
                length = _saved_bytes(tensor.shape, dtype)
                places[_index(tensor)] = _StorageInfo(file, end, length)
                end += length
            assert (folder / file).stat().st_size == end, file
        stored: dict[str, Any] = {index.fqn: BytesStorageMetadata() for index in places}
        stored |= {t.name: _one_box(t.shape, dtype) for t in tensors}
        with replacing(folder / METADATA) as out:
            pickle.dump(Metadata(stored, storage_data=places), out)
        with replacing(folder / COMMON) as out:
            out.write(_saved({}))
        write_json(folder / BACKEND, WRITTEN)


def sharded_state_dict(stage: LoopedStage) -> dict[str, Any]:
    """What `megatron.core.dist_checkpointing.save` takes of this rank's stage, and `load` fills and gives back for
    `stage.load_state_dict`; Megatron's groups must be there. As Megatron's own modules would give it, which do not know that
    tensor-parallel ranks share the biases of queries and keys and the embeddings of values."""
    from megatron.core import utils
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    found: dict[str, Any] = {}
    for holder, parameter in stage.held():
        name, axis = holder.parameter, holder.tensor_axis
        if axis is None:
            found[name] = utils.make_sharded_tensor_for_checkpoint(parameter, name)
        else:
            own = utils.make_tp_sharded_tensor_for_checkpoint(parameter, name, axis, allow_shape_mismatch=holder.padded)
            found[name] = apply_swiglu_sharded_factory(own, ()) if holder.fused == "gate_up" else own
    said = [name for name in stage.state_dict() if name.endswith("._extra_state")]
    return found | {name: make_sharded_object_for_checkpoint(None, name) for name in said}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class _Box:
    """A box of a tensor, and the bytes that have it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_Box, ...]


class Boxes:
    """The tensors of a distributed checkpoint, read when they are asked for, and its objects but those ``passed_over``."""

    def __init__(self, folder: Path, passed_over: set[str]):
        self._folder = folder
        _require_torch_dist(folder)
        self._tensors, objects = _read_metadata(folder)
        self._unknown = [name for name in objects if name.removesuffix("/shard_0_1") not in passed_over]
        for box in (box for stored in self._tensors.values() for box in stored.boxes):
            if not (folder / box.file).is_file():
                raise CheckpointError(f"{folder / METADATA} names {box.file}, which is missing")
            if (folder / box.file).stat().st_size < box.begin + box.length:
                raise CheckpointError(f"{folder / box.file} is shorter than {METADATA} says")

    @property
    def names(self) -> Sequence[str]:
        return [*self._tensors, *self._unknown]

    @property
    def stamps(self) -> list[tuple[str, int, int]]:
        files = {METADATA, *(box.file for stored in self._tensors.values() for box in stored.boxes)}
        stats = {name: (self._folder / name).stat() for name in sorted(files)}
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> Tensor:
        stored = self._tensors[name]
        if len(stored.boxes) == 1:
            return self._values(name, stored.boxes[0])
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for box in stored.boxes:
            whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = self._values(name, box)
        return whole

    def _values(self, name: str, box: _Box) -> Tensor:
        path = self._folder / box.file
        try:
            with path.open("rb") as file:
                file.seek(box.begin)
                content = io.BytesIO(file.read(box.length))
            damaged = _is_damaged(content)
            values: Any = None if damaged else torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # other bytes than torch wrote make it stumble in any way
            raise CheckpointError(f"{path} cannot be read at {name}: {reason(error)}") from None
        if damaged:
            raise CheckpointError(f"{path} is damaged at {name}")
        if not isinstance(values, Tensor) or (values.dtype, tuple(values.shape)) != (self._tensors[name].dtype, box.sizes):
            raise CheckpointError(f"{path} does not hold {name} as {METADATA} says")
        return values


def _is_damaged(content: io.BytesIO) -> bool:
    """Whether a zip, as :func:`torch.save` writes it, has other bytes than it says. Loading looks at none of its checksums."""
    damaged = None
    if zipfile.is_zipfile(content):  # loading tells of what is none
        with zipfile.ZipFile(content) as records:
            damaged = records.testzip()
    content.seek(0)
    return damaged is not None


def _require_torch_dist(folder: Path) -> None:
    try:
        backend = json.loads(read_small(folder, BACKEND, 2**16))["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / BACKEND} cannot be read ({error!r})") from None
    if backend != WRITTEN["sharded_backend"]:
        raise CheckpointError(f"{folder / BACKEND}: sharded_backend is {backend!r}; only 'torch_dist' can be read")


class _Inert(pickle._Unpickler):
    """Makes nothing that could do anything. It is the one in Python: that in C takes memory for as many objects as a number in
    the file says there are."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in INERT:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is none of {METADATA}")
        return super().find_class(module, name)


def _read_metadata(folder: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Where tensors lie, and the names of objects."""
    content = read_small(folder, METADATA, METADATA_BYTES)
    try:
        metadata = _Inert(io.BytesIO(content)).load()
        named = metadata.state_dict_metadata
        tensors = {n: _stored(n, s, metadata.storage_data) for n, s in named.items() if isinstance(s, TensorStorageMetadata)}
        return tensors, [str(name) for name in named if name not in tensors]
    except Exception as error:  # other bytes than Megatron wrote make it stumble in any way
        raise CheckpointError(f"{folder / METADATA} cannot be read: {reason(error)}") from None


def _stored(name: str, said: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]) -> _Stored:
    """Raises :class:`ValueError` where the boxes are not all of a tensor, each element once, or lie in no file beside."""
    shape, dtype = tuple(said.size), said.properties.dtype
    boxes = list[_Box]()
    for chunk in said.chunks:
        at = places[MetadataIndex(name, chunk.offsets)]
        box = _Box(tuple(chunk.offsets), tuple(chunk.sizes), at.relative_path, at.offset, at.length)
        if not re.fullmatch(r"[\w-][\w.-]*", box.file):
            raise ValueError(f"{box.file!r} is no file beside it")
        if getattr(at, "transform_descriptors", None):
            raise ValueError(f"{name} is compressed")
        if not len(shape) == len(box.offsets) == len(box.sizes) or not 0 <= box.begin <= box.begin + box.length:
            raise ValueError(f"a box of {name} cannot be")
        if not all(0 <= o <= o + n <= whole for o, n, whole in zip(box.offsets, box.sizes, shape, strict=True)):
            raise ValueError(f"a box of {name} lies outside of it")
        boxes.append(box)
    if sum(math.prod(b.sizes) for b in boxes) != math.prod(shape) or not tile(shape, [(b.offsets, b.sizes) for b in boxes]):
        raise ValueError(f"the boxes of {name} are not all of it, each element once")
    return _Stored(shape, dtype, tuple(boxes))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _object(name: str) -> MetadataIndex:
    """Where an object of one rank's is looked up."""
    return MetadataIndex(f"{name}/shard_0_1")


def _index(tensor: Planned) -> MetadataIndex:
    """Where a tensor is looked up that is one box."""
    return MetadataIndex(tensor.name, torch.Size([0] * len(tensor.shape)))


def _one_box(shape: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    return TensorStorageMetadata(TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(shape)), size)])


def _saved(values: Any) -> memoryview:
    """What :func:`torch.save` writes, which into a file would tell of a full disk as of a fault of its own."""
    content = io.BytesIO()
    torch.save(values, content)
    return content.getbuffer()


def _saved_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of a tensor as :func:`torch.save` writes it, whatever its values."""
    counted = _Counted()
    torch.save(torch.empty(shape, dtype=dtype), counted)
    return counted.written


class _Counted(io.BytesIO):
    """Takes bytes and keeps their number."""

    written = 0

    def write(self, content: Any) -> int:
        self.written += len(content)
        return len(content)
