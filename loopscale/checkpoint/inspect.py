"""What a checkpoint holds, and how two differ, read slice by slice."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import FORMAT_VERSION, Manifest, damage, read_manifest
from loopscale.checkpoint.parts import PartReader, Piece, hexadecimal
from loopscale.config.show import differences
from loopscale.corpus.progress import Progress
from loopscale.errors import CheckpointError, UsageError

SLICE = 2**20
"""Elements of a tensor that are in memory at once, a row at least."""
ASIDE = ("elapsed", "run_id")
"""Of the state, what two runs never have alike."""


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a checkpoint, fp32. ``norm`` and ``largest`` (a magnitude) are those of its finite elements."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    norm: float
    largest: float
    non_finite: int
    boxes: int
    files: int


@dataclass(frozen=True)
class KindFacts:
    """All tensors of a kind (weights, a moment), as one."""

    kind: str
    tensors: int
    elements: int
    bytes: int
    norm: float
    largest: float
    non_finite: int

    @classmethod
    def of(cls, kind: str, tensors: Iterable[TensorFacts]) -> KindFacts:
        own = [t for t in tensors if t.name.startswith(f"{kind}/")]
        return cls(
            kind, len(own), sum(math.prod(t.shape) for t in own), sum(t.bytes for t in own), math.hypot(*(t.norm for t in own)),
            max(t.largest for t in own), sum(t.non_finite for t in own),
        )  # fmt: skip


@dataclass(frozen=True)
class Inspection:
    """A checkpoint. ``size`` bytes in ``files`` files; ``tensors`` are those asked for."""

    checkpoint: str
    format: int
    size: int
    files: int
    verified: bool
    facts: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: tuple[TensorFacts, ...]

    @property
    def kinds(self) -> tuple[KindFacts, ...]:
        return tuple(KindFacts.of(k, self.tensors) for k in dict.fromkeys(t.name.split("/")[0] for t in self.tensors))


@dataclass(frozen=True)
class Difference:
    """Of a tensor in two checkpoints: elements whose bits differ, ‖a − b‖ / ‖b‖ and the largest |a − b|."""

    name: str
    differing: int
    relative: float
    largest: float


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints; ``shapes``, ``state`` and ``config`` as (name, in the first, in the second)."""

    checkpoints: tuple[str, str]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of tensors that the first alone has, and the second."""
    shapes: tuple[tuple[str, Any, Any], ...]
    tensors: tuple[Difference, ...]
    """All that both have in one shape."""
    state: tuple[tuple[str, Any, Any], ...]
    config: tuple[tuple[str, Any, Any], ...]

    @property
    def same(self) -> bool:
        """Whether the tensors are equal to the bit, and the state but for what names and times a run."""
        state = [key for key, *_ in self.state if key not in ASIDE]
        return not (*self.only[0], *self.only[1], *self.shapes, *state) and not any(t.differing for t in self.tensors)


def inspect(checkpoint: Path, progress: Progress, *, verify: bool = True, pattern: str = "*") -> Inspection:
    """Reads the tensors whose names match the glob ``pattern``.

    With ``verify`` every file is read against the manifest first, and the elements of those tensors against their digests.
    Raises :class:`CheckpointError` when it is damaged or none, :class:`UsageError` when no name matches.
    """
    manifest = verified(checkpoint, progress) if verify else read_manifest(checkpoint)
    reader, found = PartReader(checkpoint), list[TensorFacts]()
    names = _matching(reader.index, pattern)
    total, done = sum(reader.index[n].elements for n in names), 0
    progress.update("reading", 0, 4 * total)
    for name in names:
        stored, digest, norms, largest, non_finite = reader.index[name], 0, list[float](), 0.0, 0
        for piece in slices(reader, name):
            digest += int(piece.digest()) if verify else 0
            finite = piece.here.nan_to_num(0.0, 0.0, 0.0)
            non_finite += piece.here.numel() - int(piece.here.isfinite().sum())
            norms.append(float(torch.linalg.vector_norm(finite, dtype=torch.float64)))
            largest = max(largest, float(finite.abs().amax()))
            done += piece.here.numel()
            progress.update("reading", 4 * done, 4 * total)
        if verify and hexadecimal(digest) != stored.digest:
            raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {name} has other elements than its digest says")
        boxes, files = len(stored.boxes), len({box.file for box in stored.boxes})
        found.append(TensorFacts(name, stored.shape, 4 * stored.elements, math.hypot(*norms), largest, non_finite, boxes, files))
    state = store.load_state(checkpoint)
    return Inspection(
        checkpoint.name, FORMAT_VERSION, manifest.size, len(manifest.files), verify, manifest.facts, state, tuple(found)
    )


def compare(first: Path, second: Path, progress: Progress, *, verify: bool = True, pattern: str = "*") -> Comparison:
    """How two checkpoints differ: in tensors whose names match ``pattern``, state and configuration; see :func:`inspect`."""
    if verify:
        verified(first, progress)
        verified(second, progress)
    readers = PartReader(first), PartReader(second)
    a, b = (reader.index for reader in readers)
    names = _matching({**a, **b}, pattern)
    common = [n for n in names if n in a and n in b]
    alike = [n for n in common if a[n].shape == b[n].shape]
    total, done, found = sum(a[n].elements for n in alike), 0, list[Difference]()
    progress.update("comparing", 0, 4 * total)
    for name in alike:
        differing, between, size, largest = 0, list[float](), list[float](), list[float]()
        for mine, other in zip(*(slices(reader, name) for reader in readers), strict=True):
            unlike = mine.here.view(torch.int32) != other.here.view(torch.int32)
            apart = torch.where(unlike, mine.here.double() - other.here, 0.0)  # what is not finite on both sides is no difference
            between.append(float(torch.linalg.vector_norm(apart)))
            size.append(float(torch.linalg.vector_norm(other.here, dtype=torch.float64)))
            largest.append(float(apart.abs().amax()))
            differing += int(unlike.sum())
            done += mine.here.numel()
            progress.update("comparing", 4 * done, 4 * total)
        relative = _ratio(math.hypot(*between), math.hypot(*size))
        found.append(Difference(name, differing, relative, math.nan if math.isnan(relative) else max(largest)))
    return Comparison(
        (first.name, second.name),
        (tuple(n for n in names if n not in b), tuple(n for n in names if n not in a)),
        tuple((n, list(a[n].shape), list(b[n].shape)) for n in common if n not in alike),
        tuple(found),
        tuple(differences(store.load_state(first), store.load_state(second))),
        tuple(differences(store.load_config(first), store.load_config(second))),
    )


def verified(checkpoint: Path, progress: Progress) -> Manifest:
    """The manifest of a checkpoint, after its files have been read against it; raises :class:`CheckpointError`."""
    manifest, done = read_manifest(checkpoint), 0
    progress.update(f"verifying {checkpoint.name}", 0, manifest.size)
    for file in manifest.files:
        if found := damage(checkpoint, [file]):
            raise CheckpointError(found)
        done += file.size
        progress.update(f"verifying {checkpoint.name}", done, manifest.size)
    return manifest


def slices(reader: PartReader, name: str) -> Iterator[Piece]:
    """A tensor from its first row to its last, whole rows at a time."""
    shape = reader.index[name].shape
    height = max(1, SLICE // math.prod(shape[1:]))
    for row in range(0, shape[0], height):
        here = torch.empty(min(height, shape[0] - row), *shape[1:])
        piece = Piece(name, shape, (row, 0)[: len(shape)], here)
        reader.read([piece])
        yield piece


def as_json(found: Inspection | Comparison) -> str:
    """JSON, in which a number that is not finite is a word."""
    extra = {"kinds": [asdict(k) for k in found.kinds]} if isinstance(found, Inspection) else {"same": found.same}
    return json.dumps(_plain({**asdict(found), **extra}), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show(found: Inspection, console: Console) -> None:
    """Prints tables: the tensors, their kinds, and what else the checkpoint says."""
    table = _table("tensor", "shape", "MB", "L2 norm", "largest", "non-finite", "boxes", "files")
    for t in found.tensors:
        table.add_row(t.name, "×".join(map(str, t.shape)), *_numbers(t), str(t.boxes), str(t.files), style=_style(t))
    kinds = _table("kind", "tensors", "elements", "MB", "L2 norm", "largest", "non-finite")
    for k in found.kinds:
        kinds.add_row(k.kind, str(k.tensors), f"{k.elements:,}", *_numbers(k), style=_style(k))
    state = _table("state.json and manifest", "")
    for key, value in _flat({**found.state, "facts": found.facts}):
        state.add_row(key, value)
    checked = "files and elements verified" if found.verified else "not verified"
    head = f"{found.checkpoint} · format {found.format} · {found.size / 1e6:,.1f} MB in {found.files} files, fp32 · {checked}"
    _print(console, head, table, kinds, state)


def show_comparison(found: Comparison, console: Console) -> None:
    """Prints what differs."""
    first, second = found.checkpoints
    differing = [t for t in found.tensors if t.differing]
    table = _table("tensor", "elements that differ", "‖a−b‖/‖b‖", "largest |a−b|")
    for t in differing:
        table.add_row(t.name, f"{t.differing:,}", f"{t.relative:.3g}", f"{t.largest:.3g}")
    others = _table("", f"a: {first}", f"b: {second}")
    for names, a, b in ((found.only[0], "has it", "–"), (found.only[1], "–", "has it")):
        for name in names:
            others.add_row(name, a, b)
    for prefix, pairs in (("shape of ", found.shapes), ("state ", found.state), ("config ", found.config)):
        for key, a, b in pairs:
            others.add_row(prefix + key, _short(a), _short(b))
    equal = len(found.tensors) - len(differing)
    _print(console, f"{equal} of {len(found.tensors)} tensors are equal to the bit", table, others)


def _table(name: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _numbers(of: TensorFacts | KindFacts) -> tuple[str, ...]:
    return f"{of.bytes / 1e6:,.2f}", f"{of.norm:.4g}", f"{of.largest:.4g}", f"{of.non_finite:,}"


def _style(of: TensorFacts | KindFacts) -> str | None:
    return "bold red" if of.non_finite else None


def _print(console: Console, head: str, *tables: Table) -> None:
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    for table in tables:
        if table.row_count:
            console.print()
            console.print(table)


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _short(value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else math.inf if difference else 0.0


def _matching(names: Mapping[str, Any], pattern: str) -> list[str]:
    found = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
    if not found:
        raise UsageError(f"--filter {pattern!r} matches no tensor; names are like {next(iter(names), 'none')}")
    return found
