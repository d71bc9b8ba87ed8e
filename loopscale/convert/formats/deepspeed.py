"""A checkpoint of DeepSpeed, ZeRO 0 or 1: what `engine.save_checkpoint` writes of stages of ours, whose engine was given the
model-parallel groups (`mpu`).

The folder has `latest`, and in the folder that this names `mp_rank_NN_model_states.pt` of each rank of one replica, with its
whole weights under the names of the stage's parameters (see ``stage.py``); FROM may be either. Shares of a parameter are joined
along the axis that tensor parallelism divides, in the order of ranks; what all tensor-parallel ranks of a stage hold in full must
be the same on each, to the bit. What optimizers keep (`zero_pp_rank_*`) is not read: the
weights of an fp32 model are all there is, and those of another one are refused, for its optimizer has better ones.

The files are pickles, of which only tensors and plain values are made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from loopscale.checkpoint.commit import read_small
from loopscale.config import Config
from loopscale.convert.formats.stage import StageFormat, passed_over
from loopscale.convert.tensors import HELD, Source, reason
from loopscale.errors import CheckpointError, UsageError
from loopscale.model.weights import Holder, holders

LATEST = "latest"
STATES = re.compile(r"mp_rank_(\d+)_model_states\.pt")


class DeepSpeed(StageFormat):
    name: ClassVar = "deepspeed"
    written: ClassVar = False

    def recognises(self, place: Path) -> bool:
        return (place / LATEST).is_file() or any(place.glob("mp_rank_*_model_states.pt"))

    def about(self, config: Config) -> dict[str, Any]:
        raise UsageError("models are not written as checkpoints of DeepSpeed; --to megatron writes one for the same stages")

    def source(self, place: Path, config: Config) -> Source:
        table = {holder.parameter: holder for holder in holders(config.model, config.corpus.sequence_length)}
        return Shares(_step(place), table, passed_over(config.model))

    def unlike(self, config: Config, names: Collection[str]) -> str | None:
        numbered = bool(names) and all(name.isdigit() for name in names)
        return "its parameters have numbers for names: the engine was given a list of them and not a stage" if numbered else None


def _step(place: Path) -> Path:
    """The folder with the weights."""
    if not (place / LATEST).is_file():
        return place
    tag = read_small(place, LATEST, 2**12).decode(errors="replace").strip()
    if not re.fullmatch(r"[\w-][\w.-]*", tag) or not (place / tag).is_dir():
        raise CheckpointError(f"{place / LATEST} names {tag!r}, which is no folder beside it")
    return place / tag


class Shares:
    """Parameters of all ranks of a replica, joined as ``table`` says when they are asked for; names in ``passed_over`` are no
    tensors of the model."""

    def __init__(self, folder: Path, table: Mapping[str, Holder], passed_over: set[str]):
        self._folder, self._table = folder, table
        self._files = _rank_files(folder)
        self._open: dict[str, dict[str, Any]] = {}
        self._read = 0
        """Bytes that were read of open files: they stay in memory until these are closed."""
        self._where = dict[str, list[str]]()
        for file in self._files:
            for name in self._module(file):
                if name not in passed_over:
                    self._where.setdefault(name, []).append(file)
        self._open.clear()
        sharing = Counter(len(files) for name, files in self._where.items() if name in table)
        self._sharing = max(sharing, key=lambda size: (sharing[size], size), default=1)
        """Tensor-parallel ranks of a stage, one after the other: as many as have most parameters."""

    @property
    def names(self) -> Sequence[str]:
        return list(self._where)

    @property
    def stamps(self) -> list[tuple[str, int, int]]:
        stats = {name: (self._folder / name).stat() for name in self._files}
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]

    def shape(self, name: str) -> tuple[int, ...]:
        self._require_one_stage(name)
        shares, holder = self._shares(name), self._table[name]
        first, *others = (tuple(share.shape) for share in shares)
        if any(shape != first for shape in others):
            raise CheckpointError(f"{self._folder}: ranks have {name} in shapes {', '.join(str(list(s.shape)) for s in shares)}")
        if (axis := holder.tensor_axis) is None:
            if first == holder.weights[0].shape:
                self._require_alike(name, shares)
            return first
        return first if len(first) <= axis else (*first[:axis], len(shares) * first[axis], *first[axis + 1 :])

    def read(self, name: str) -> Tensor:
        shares, holder = self._shares(name), self._table[name]
        self._read += sum(share.nbytes for share in shares)
        if holder.tensor_axis is None:
            return shares[0]
        if holder.fused == "gate_up":
            halves = [share.chunk(2) for share in shares]
            return torch.cat([half[i] for i in (0, 1) for half in halves])
        return torch.cat(shares, dim=holder.tensor_axis)

    def _require_one_stage(self, name: str) -> None:
        """All tensor-parallel ranks of one stage have it, and no others."""
        having = self._where[name]
        begin = self._files.index(having[0]) // self._sharing * self._sharing
        stage = self._files[begin : begin + self._sharing]
        if lacking := [file for file in stage if file not in having]:
            raise CheckpointError(f"{self._folder / lacking[0]} lacks {name}, which {having[0]} of the same stage holds")
        if odd := [file for file in having if file not in stage]:
            raise CheckpointError(f"{self._folder / odd[0]} holds {name}, which {having[0]} of another stage holds too")

    def _require_alike(self, name: str, shares: Sequence[Tensor]) -> None:
        self._read += sum(share.nbytes for share in shares)
        for share, file in zip(shares, self._where[name], strict=True):
            if not torch.equal(_bits(share), _bits(shares[0])):
                there = self._where[name][0]
                raise CheckpointError(f"{self._folder / file} holds {name} in full, as {there} does, and with other values")

    def _shares(self, name: str) -> list[Tensor]:
        if self._read > HELD:
            self._open.clear()
            self._read = 0
        return [self._share(file, name) for file in self._where[name]]

    def _share(self, file: str, name: str) -> Tensor:
        found = self._module(file)[name]
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{self._folder / file} holds {name} as no tensor")
        if not _is_dense(found):
            raise CheckpointError(f"{self._folder / file} holds {name}, which is no dense tensor")
        if found.dtype != torch.float32:
            raise CheckpointError(
                f"{self._folder / file} holds {name} in {str(found.dtype).removeprefix('torch.')}: the optimizer has it in fp32, "
                f"which is not read; save an engine whose model is fp32"
            )
        return found.detach()

    def _module(self, file: str) -> dict[str, Any]:
        if file not in self._open:
            self._open[file] = self._opened(self._folder / file)
        return self._open[file]

    def _opened(self, path: Path) -> dict[str, Any]:
        """The module's tensors in a file; their data are read where they are asked for."""
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # other bytes than torch wrote make it stumble in any way
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
        module = held.get("module") if isinstance(held, dict) else None
        if not isinstance(module, dict) or not all(isinstance(name, str) for name in module):
            raise CheckpointError(f"{path} does not hold a module's tensors by name")
        if held.get("mp_world_size") != len(self._files):
            raise CheckpointError(f"{path} is one of {held.get('mp_world_size')} ranks', {path.parent} has {len(self._files)}")
        return module


def _is_dense(tensor: Tensor) -> bool:
    """Whether it has its elements, each at its place."""
    other = tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided
    return type(tensor) in (Tensor, nn.Parameter) and not other


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous().view(torch.int32)


def _rank_files(folder: Path) -> list[str]:
    """Names of the files of all ranks of a replica, in their order."""
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        raise UsageError(f"{folder} is of ZeRO 3, which leaves each rank pieces of weights; only ZeRO 0 and 1 can be read")
    found = dict[int, str]()
    for name in sorted(path.name for path in folder.iterdir()):
        if match := STATES.fullmatch(name):
            rank = int(match[1])
            if rank in found:
                raise UsageError(f"{folder} holds {found[rank]} and {name}, both of rank {rank}; remove one")
            found[rank] = name
    if not found:
        raise UsageError(f"{folder} holds no weights: no mp_rank_00_model_states.pt")
    if missing := [rank for rank in range(len(found)) if rank not in found]:
        raise CheckpointError(f"{folder} holds {found[max(found)]} and no mp_rank_{missing[0]:02d}_model_states.pt")
    return [found[rank] for rank in sorted(found)]
