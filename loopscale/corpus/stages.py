"""What a build runs in worker processes: reading a unit, tokenizing a piece.

Each call leaves files that appear whole or not at all, and does nothing when they are there: so a build that was
killed keeps its finished pieces. Nothing here depends on which process runs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from loopscale.config.corpus import SourceConfig
from loopscale.corpus.arrange import ROW, Piece, digests
from loopscale.corpus.contamination import contaminated, evaluation_ngrams
from loopscale.corpus.documents import Broken, Unit, read_unit
from loopscale.corpus.tokenizer import load_tokenizer
from loopscale.durable import replacing, write_json

EXAMPLES = 20
"""Broken lines of a unit that are listed; the rest are only counted."""
_BATCH_BYTES = 1 << 18


@dataclass(frozen=True)
class ReadJob:
    """A unit to read into ``folder``; ``number`` names its files, ``plan`` the build."""

    plan: str
    folder: Path
    number: int
    unit: Unit
    source: SourceConfig
    seed: int
    decontaminate: tuple[str, ...]


@dataclass(frozen=True)
class TokenizeJob:
    """A piece to tokenize: texts are in ``texts``, the result is the file ``target``; ``plan`` names the build."""

    plan: str
    target: Path
    texts: Path
    piece: Piece
    tokenizer: Path
    end_of_text: int
    dtype: str


@dataclass(frozen=True)
class UnitSummary:
    """What reading a unit found. ``examples`` are sentences about the first broken lines."""

    documents: int
    empty: int
    contaminated: int
    broken: int
    examples: tuple[str, ...]


def read(job: ReadJob) -> UnitSummary:
    """Stores the texts of a unit one after the other (.txt), a row per document (.npy) and a summary (.json)."""
    done = text_file(job.folder, job.number).with_suffix(".json")
    if not done.exists():
        with replacing(done.with_suffix(".txt")) as texts:
            rows, summary = _read_into(texts, job)
        with replacing(done.with_suffix(".npy")) as out:
            np.save(out, rows)
        write_json(done, summary.__dict__)
    found = json.loads(done.read_text(encoding="utf-8"))
    return UnitSummary(**{**found, "examples": tuple(found["examples"])})


def tokenize(job: TokenizeJob) -> Path:
    """Stores the tokens of a piece, each document ended by ``end_of_text``, and the documents' lengths (.npz)."""
    if not job.target.exists():
        tokenizer = _tokenizer(job.tokenizer, job.plan)
        texts = document_texts(job.texts, job.piece.units, job.piece.rows)
        encoded = [_with_end(ids, job) for batch in _batched(texts) for ids in _encode(tokenizer, batch)]
        with replacing(job.target) as out:
            np.savez(out, tokens=np.concatenate(encoded), lengths=np.array([len(e) for e in encoded], np.int64))
    return job.target


def text_file(folder: Path, unit: int) -> Path:
    return folder / f"{unit:05}.txt"


def document_texts(folder: Path, units: NDArray[np.int64], rows: NDArray[np.void]) -> Iterator[str]:
    """Texts of documents in the order given."""
    files: dict[int, BinaryIO] = {}
    try:
        for unit, row in zip(units.tolist(), rows, strict=True):
            if unit not in files:
                if len(files) == 256:  # far below any limit on open files
                    files.pop(next(iter(files))).close()
                files[unit] = text_file(folder, unit).open("rb")
            files[unit].seek(int(row["offset"]))
            yield files[unit].read(int(row["bytes"])).decode("utf-8")
    finally:
        for file in files.values():
            file.close()


def _read_into(texts: BinaryIO, job: ReadJob) -> tuple[NDArray[np.void], UnitSummary]:
    ngrams = _ngrams(job.decontaminate, job.plan)
    rows: list[NDArray[np.void]] = []
    chunk: list[tuple[int, int, int, int]] = []
    examples: list[str] = []
    broken = empty = leaked = offset = 0
    for item in read_unit(job.unit, job.source):
        if isinstance(item, Broken):
            broken += 1
            if len(examples) < EXAMPLES:
                examples.append(f"{item.where} {item.reason}")
        elif not item.text:
            empty += 1
        elif contaminated(item.text, ngrams):
            leaked += 1
        else:
            raw = item.text.encode("utf-8")
            chunk.append((*digests(item, raw, job.unit.source, job.seed), offset, len(raw)))
            texts.write(raw)
            offset += len(raw)
            if len(chunk) == 1 << 16:  # as an array a row takes 32 bytes, as a tuple ten times that
                rows.append(np.array(chunk, ROW))
                chunk = []
    rows.append(np.array(chunk, ROW))
    every = np.concatenate(rows)
    return every, UnitSummary(len(every), empty, leaked, broken, tuple(examples))


def _batched(texts: Iterator[str]) -> Iterator[list[str]]:
    """Batches of a bounded number of characters: an encoded text takes many times its own memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[str]) -> Iterator[list[int]]:
    return (encoding.ids for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False))


def _with_end(ids: list[int], job: TokenizeJob) -> NDArray[np.unsignedinteger[Any]]:
    return np.array([*ids, job.end_of_text], job.dtype)


# A worker serves many jobs of one build, so what is slow to load is loaded once per process.
@lru_cache(maxsize=1)
def _ngrams(patterns: tuple[str, ...], plan: str) -> frozenset[str]:
    return evaluation_ngrams(patterns)


@lru_cache(maxsize=1)
def _tokenizer(path: Path, plan: str) -> Tokenizer:
    return load_tokenizer(path)
