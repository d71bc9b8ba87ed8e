"""Tensors in other people's files, read one at a time, and written as safetensors shards.

A checkpoint is a folder: `model.safetensors`, or shards with `model.safetensors.index.json`; or the same as PyTorch pickles
(`pytorch_model.bin`, `model.pt`), of which only tensors are read: nothing in them is executed.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopscale.checkpoint.parts import safetensors_head
from loopscale.durable import replacing, write_json
from loopscale.errors import CheckpointError, UsageError

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin", "model.pt")
HELD = 2**25
"""Bytes that are read of a file before it is opened anew."""
TELLING = (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError)
"""Errors that say what is wrong in their first line."""
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Source(Protocol):
    """Tensors of other people's by name."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def stamps(self) -> list[tuple[str, int, int]]:
        """Name, size and time of the last change of each file that holds them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises :class:`CheckpointError` that names the file where it cannot be read."""

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored; raises as :meth:`shape`."""


def read_fp32(source: Source, name: str) -> Tensor:
    """Raises :class:`CheckpointError` where it holds other than finite numbers of a floating type: a tensor that was quantised
    is nothing without its scales."""
    values = source.read(name)
    if values.dtype not in (*TYPES, torch.float64):
        kinds = "float32, bfloat16, float16 and float64"
        raise CheckpointError(f"{name} has the type {str(values.dtype).removeprefix('torch.')}; only {kinds} can be read")
    values = values.float()
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{name} holds a number that is not finite; no model can be made of it")
    return values


class Shards:
    """Those of a checkpoint folder of safetensors files or pickles."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._where = self._places()
        self._open, self._read = ("", None), 0
        """The file read last, and how much was read of it: what was read of a file stays in memory until it is closed."""

    @property
    def names(self) -> Sequence[str]:
        return list(self._where)

    @property
    def stamps(self) -> list[tuple[str, int, int]]:
        files = {name: (self._folder / name).stat() for name in sorted(set(self._where.values()))}
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files.items()]

    def shape(self, name: str) -> tuple[int, ...]:
        file = self._file(name)
        return tuple(file[name].shape if isinstance(file, dict) else self._asked(name, lambda: file.get_slice(name).get_shape()))

    def read(self, name: str) -> Tensor:
        file = self._file(name)
        tensor: Tensor = file[name].detach() if isinstance(file, dict) else self._asked(name, lambda: file.get_tensor(name))
        self._read += tensor.nbytes
        return tensor

    def _places(self) -> dict[str, str]:
        """The file of each tensor."""
        for index in INDICES:
            if (self._folder / index).is_file():
                return self._indexed(index)
        for name in SINGLE:
            if (self._folder / name).is_file():
                file = self._opened(name)
                return dict.fromkeys(file if isinstance(file, dict) else file.keys(), name)
        raise UsageError(f"{self._folder} holds no weights: none of {', '.join((*INDICES, *SINGLE))}")

    def _indexed(self, index: str) -> dict[str, str]:
        try:
            places = json.loads((self._folder / index).read_bytes())["weight_map"]
            places = {str(name): str(file) for name, file in places.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self._folder / index} cannot be read ({error!r})") from None
        for file in sorted(set(places.values())):
            if not re.fullmatch(r"[\w-][\w.-]*", file):
                raise CheckpointError(f"{self._folder / index} names {file!r}, which is no file beside it")
            if not (self._folder / file).is_file():
                raise CheckpointError(f"{self._folder / index} names {file}, which is missing")
            held = self._opened(file)
            own = set(held if isinstance(held, dict) else held.keys())
            promised = {name for name, at in places.items() if at == file}
            if own != promised:
                odd = sorted(own ^ promised)[0]
                raise CheckpointError(f"{self._folder / file} and {index} differ about {odd}")
        return places

    def _file(self, name: str) -> Any:
        file = self._where[name]
        if self._open[0] != file or self._read > HELD:
            self._open, self._read = ("", None), 0  # closed first
            self._open = (file, self._opened(file))
        return self._open[1]

    def _opened(self, file: str) -> Any:
        """A safetensors file, or the tensors of a pickle; their data are read where they are asked for."""
        path = self._folder / file
        try:
            if file.endswith(".safetensors"):
                return safe_open(path, "pt")
            zipped = zipfile.is_zipfile(path)  # as torch has written them since 1.6
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # a changed byte leads an unpickler to any of them
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
        if not isinstance(held, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items()):
            raise CheckpointError(f"{path} does not hold tensors by name")
        if odd := [k for k, v in held.items() if v.is_nested or v.layout != torch.strided or v.is_quantized or v.is_meta]:
            raise CheckpointError(f"{path} holds {odd[0]} as no dense tensor")
        return held

    def _asked(self, name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder / self._where[name]} cannot be read at {name}: {error}") from None


def reason(error: Exception) -> str:
    """Why a file of theirs cannot be read, in a line."""
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(
        error
    ):  # and advice to load it all the same
        asked = re.search(r"(?:GLOBAL|global|class|type) ([\w.]+\.[\w.]+)", str(error).partition("Unsupported")[2] or str(error))
        what = f"it asks for {asked[1]}, which is no tensor" if asked else "it holds what is no tensor"
        return f"{what}; nothing in it was executed"
    if isinstance(error, EOFError):
        return "it ends too early"
    told = str(error).splitlines()[:1] if isinstance(error, TELLING) else []
    return told[0] if told else repr(error)


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_shards(
    folder: Path, tensors: Sequence[Planned], dtype: torch.dtype, shard_bytes: int, numbered: bool = False
) -> Iterator[int]:
    """Writes tensors into shards of at most ``shard_bytes``, larger tensors aside, and their index; yields bytes written. One
    shard alone has no number and no index, unless ``numbered``.

    One tensor is in memory at a time. A shard appears when it is whole; those that are there already are kept, so a call that
    was killed is made again.
    """
    planned = list(shards(tensors, dtype.itemsize, shard_bytes))
    places = {}
    for number, shard in enumerate(planned, 1):
        single = len(planned) == 1 and not numbered
        file = SINGLE[0] if single else f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        places.update(dict.fromkeys((t.name for t in shard), file))
        if not (folder / file).exists():
            with replacing(folder / file) as out:
                yield from _write_shard(out, shard, dtype)
        else:
            yield sum(math.prod(t.shape) for t in shard) * dtype.itemsize
    if len(planned) > 1 or numbered:
        total = sum(math.prod(t.shape) for t in tensors) * dtype.itemsize
        write_json(folder / INDICES[0], {"metadata": {"total_size": total}, "weight_map": places})


def shards(tensors: Sequence[Planned], itemsize: int, most: int) -> Iterator[list[Planned]]:
    """Tensors of ``itemsize`` bytes an element in order, as many in a shard as ``most`` bytes hold."""
    shard, held = list[Planned](), 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if shard and held + size > most:
            yield shard
            shard, held = [], 0
        shard.append(tensor)
        held += size
    yield shard


def _write_shard(out: BinaryIO, shard: Sequence[Planned], dtype: torch.dtype) -> Iterator[int]:
    sized = ((t.name, TYPES[dtype], t.shape, math.prod(t.shape) * dtype.itemsize) for t in shard)
    out.write(safetensors_head(sized, {"format": "pt"}))
    for tensor in shard:
        values = tensor.make().to(dtype).contiguous()
        assert tuple(values.shape) == tensor.shape, tensor.name
        out.write(values.view(torch.uint8).numpy().data if values.dim() else values.numpy().tobytes())
        yield values.nbytes
