"""Building a corpus: read, arrange, tokenize, write, publish.

    read      sources -> OUTPUT.building/text     texts as found and one row per document, a file set per unit
    arrange   rows -> pieces                      split, mixture, order: from keyed digests (``arrange``)
    tokenize  pieces -> OUTPUT.building/tokens    one file per piece
    write     tokens -> OUTPUT.building/corpus    MDS shards and indices, then corpus.json
    publish   OUTPUT.building/corpus -> OUTPUT    one rename

Reading and tokenizing run in any number of processes with the same result. A build that was killed goes on with the
units and pieces that were finished; the shards are written anew from them, which is quick. On the way the folder
holds all text and all tokens once, beside the shards.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopscale.config.corpus import CorpusBuild, TokenizerConfig
from loopscale.corpus.arrange import PIECE_BYTES, ROW, Piece, arrange
from loopscale.corpus.documents import Unit, find_units, text_files
from loopscale.corpus.folder import FORMAT, Corpus, building_folder, open_corpus
from loopscale.corpus.progress import Progress, progress_to
from loopscale.corpus.stages import EXAMPLES, ReadJob, TokenizeJob, UnitSummary, document_texts, read, text_file, tokenize
from loopscale.durable import content_digest, file_digest, locked, replacing, sync, sync_tree, write_json
from loopscale.errors import DataError, UsageError

RECORD_TOKENS = 1 << 14
"""Longer documents are cut into several records, so that reading a sample does not mean reading a book."""
HASH = "sha256"

Job = TypeVar("Job")
Result = TypeVar("Result")


def build(config: CorpusBuild, *, progress: Progress | None = None) -> Corpus:
    """Makes the corpus that ``config`` describes and returns it; returns an existing one made from the same.

    Raises :class:`UsageError` when the output is another corpus or is being built, or when a source is not there,
    and :class:`DataError` when a source is damaged or more than ``broken_share`` of its lines are unreadable.
    """
    progress = progress or progress_to()
    output = Path(config.output)
    units = find_units(config.sources)
    plan = _plan_digest(config, units)
    if output.exists():
        return _existing(output, plan, progress)
    work = building_folder(output)
    try:
        with locked(work / "lock", wait=False) as mine:
            if not mine:
                raise UsageError(f"corpus {output} is being built by another process ({work / 'lock'} is held)")
            _resume_or_clear(work, plan, progress)
            _build_in(work, config, plan, units, progress)
            os.rename(work / "corpus", output)
            sync(output.parent)
            shutil.rmtree(work)
    finally:
        progress.close()
    return open_corpus(output)


def _build_in(work: Path, config: CorpusBuild, plan: str, units: Sequence[Unit], progress: Progress) -> None:
    processes = config.processes or len(os.sched_getaffinity(0))
    found = _read_all(work / "text", config, plan, units, processes, progress)
    pieces = _arrange_all(work / "text", config, units)
    shutil.rmtree(work / "corpus", ignore_errors=True)
    (work / "corpus").mkdir()
    tokenizer = _make_tokenizer(work, config.tokenizer, pieces, progress)
    jobs = _tokenize_jobs(work, plan, pieces, tokenizer)
    total, done = sum(p.bytes for p in pieces), 0
    splits: dict[str, Any] = {}
    progress.update("tokenizing", 0, total)
    results = iter(_in_order(tokenize, jobs, processes))
    for split in ("validation", "train"):
        writer = _SplitWriter(work / "corpus" / split, config, tokenizer)
        for piece in (p for p in pieces if p.split == split):
            writer.add(piece, next(results))
            done += piece.bytes
            progress.update("tokenizing", done, total)
        splits[split] = writer.finish()
    _write_about(work / "corpus", config, plan, tokenizer, splits, found)
    sync_tree(work / "corpus")
    _report(splits, tokenizer, progress)


# ---------------------------------------------------------------------------------------------------------------------
# Starting


def _plan_digest(config: CorpusBuild, units: Sequence[Unit]) -> str:
    """Digest of all that the result depends on, as far as it shows without reading: a changed file has a new time."""
    chosen = config.model_dump(exclude={"output", "processes"})
    named = [config.tokenizer.file] if config.tokenizer.file else []
    read_too = [*named, *(str(p) for pattern in config.decontaminate for p in text_files(pattern))]
    paths = [path for unit in units if unit.bytes is not None for path in unit.paths] + read_too
    states = [(path, s.st_size, s.st_mtime_ns) for path in paths if os.path.exists(path) for s in [os.stat(path)]]
    sizes = [PIECE_BYTES, RECORD_TOKENS]
    return content_digest([FORMAT, sizes, chosen, [(u.source, u.paths) for u in units], states])


def _existing(output: Path, plan: str, progress: Progress) -> Corpus:
    if not (output / "corpus.json").is_file():
        raise UsageError(f"output {output} exists and is not a corpus; give another output=FOLDER")
    corpus = open_corpus(output)
    if corpus.about.get("plan") != plan:
        raise UsageError(
            f"output {output} is a corpus made from other sources or settings (fingerprint {corpus.fingerprint[:12]}); "
            f"remove it, or give another output=FOLDER"
        )
    progress.note(f"{output} is up to date (fingerprint {corpus.fingerprint[:12]})")
    return corpus


def _resume_or_clear(work: Path, plan: str, progress: Progress) -> None:
    """Keeps the pieces of an interrupted build of the same plan; clears those of another."""
    known = work / "plan.json"
    if known.exists() and json.loads(known.read_text())["plan"] == plan:
        progress.note(f"going on with the build in {work}")
    else:
        for leftover in ("text", "tokens", "corpus"):
            shutil.rmtree(work / leftover, ignore_errors=True)
        write_json(known, {"plan": plan})
    for folder in ("text", "tokens"):
        (work / folder).mkdir(exist_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _read_all(
    folder: Path, config: CorpusBuild, plan: str, units: Sequence[Unit], processes: int, progress: Progress
) -> UnitSummary:
    """Reads every unit; raises :class:`DataError` when too many lines are broken."""
    jobs = [ReadJob(plan, folder, i, u, config.sources[u.source], config.seed, config.decontaminate) for i, u in enumerate(units)]
    sizes = [u.bytes for u in units]
    total = None if None in sizes else sum(s for s in sizes if s is not None)
    done = 0
    progress.update("reading", 0, total)
    summaries = []
    for unit, summary in zip(units, _in_order(read, jobs, processes), strict=True):
        summaries.append(summary)
        done += unit.bytes or 0
        progress.update("reading", done, total)
    found = UnitSummary(
        documents=sum(s.documents for s in summaries),
        empty=sum(s.empty for s in summaries),
        contaminated=sum(s.contaminated for s in summaries),
        broken=sum(s.broken for s in summaries),
        examples=tuple(e for s in summaries for e in s.examples)[:EXAMPLES],
    )
    _judge_broken(found, config.broken_share, progress)
    if found.contaminated:
        progress.note(f"left out {found.contaminated:,} documents that share 13 words with the files of decontaminate")
    return found


def _judge_broken(found: UnitSummary, allowed: float, progress: Progress) -> None:
    if not found.broken:
        return
    every = found.documents + found.empty + found.contaminated + found.broken
    listed = "".join(f"\n  {example}" for example in found.examples[:5])
    more = f"\n  and {found.broken - 5:,} more" if found.broken > 5 else ""
    counted = f"{found.broken:,} of {every:,} lines hold no usable text ({found.broken / every:.2%}):{listed}{more}"
    if found.broken > allowed * every:
        raise DataError(f"{counted}\nmore than broken_share={allowed:g} allows; mend the source, or raise broken_share")
    progress.note(f"left out: {counted}")


def _arrange_all(folder: Path, config: CorpusBuild, units: Sequence[Unit]) -> list[Piece]:
    rows = [np.load(text_file(folder, i).with_suffix(".npy")) for i in range(len(units))]
    counts = [len(r) for r in rows]
    weights = [s.weight for s in config.sources if s.weight is not None]
    return arrange(
        np.concatenate(rows) if rows else np.zeros(0, ROW),
        np.repeat(np.arange(len(units)), counts),
        np.repeat([u.source for u in units], counts),
        config.held_out,
        weights or None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizing


@dataclass(frozen=True)
class _Tokenizer:
    """The tokenizer's file in the corpus, and what the shards need to know of it."""

    path: Path
    name: str
    vocab_size: int
    end_of_text: int

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"


def _make_tokenizer(work: Path, config: TokenizerConfig, pieces: Sequence[Piece], progress: Progress) -> _Tokenizer:
    from loopscale.corpus.tokenizer import TRAINERS, end_of_text, load_tokenizer, vocabulary_size

    path = work / "corpus" / "tokenizer.json"
    trained = work / "tokenizer.json"
    if config.file is None and not trained.exists():
        count = sum(len(p.rows) for p in pieces if p.split == "train")
        documents = min(config.documents or count, count)
        progress.note(f"training a tokenizer ({config.kind}) of {config.vocab_size:,} entries on {documents:,} documents")
        tokenizer = TRAINERS[config.kind](_training_texts(work / "text", pieces, config.documents), config.vocab_size)
        with replacing(trained) as out:
            out.write(tokenizer.to_str(pretty=True).encode())
    origin = Path(config.file) if config.file else trained
    tokenizer = load_tokenizer(origin)
    shutil.copyfile(origin, path)
    size = vocabulary_size(tokenizer)
    name = f"{origin.parent.name or origin.stem}-{size}" if config.file else f"{config.kind}-{size}"
    return _Tokenizer(path, name, size, end_of_text(tokenizer, origin))


def _training_texts(folder: Path, pieces: Sequence[Piece], documents: int | None) -> Iterator[str]:
    """Texts of the training split in the corpus's order, the first ``documents`` of them."""
    left = documents
    for piece in (p for p in pieces if p.split == "train"):
        take = len(piece.rows) if left is None else min(left, len(piece.rows))
        yield from document_texts(folder, piece.units[:take], piece.rows[:take])
        left = None if left is None else left - take


def _tokenize_jobs(work: Path, plan: str, pieces: Sequence[Piece], tokenizer: _Tokenizer) -> list[TokenizeJob]:
    return [
        TokenizeJob(
            plan, work / "tokens" / f"{i:05}.npz", work / "text", piece, tokenizer.path, tokenizer.end_of_text, tokenizer.dtype
        )
        for i, piece in enumerate(pieces)
    ]


def _in_order(work: Callable[[Job], Result], jobs: Iterable[Job], processes: int) -> Iterator[Result]:
    """Results in the order of the jobs, computed here or by a pool."""
    if processes == 1:
        yield from map(work, jobs)
        return
    try:
        # Spawned, for this process may have threads; workers import neither torch nor streaming.
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker) as pool:
            yield from pool.map(work, jobs)
    except BrokenProcessPool:
        raise DataError(
            "a process of the build died, perhaps for want of memory; run it again to go on, with fewer processes=N if it recurs"
        ) from None


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent was killed must not stay."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class _SplitWriter:
    """Writes one split: records into MDS shards, and the indices beside them."""

    def __init__(self, folder: Path, config: CorpusBuild, tokenizer: _Tokenizer):
        from streaming import MDSWriter

        self._folder = folder
        self._mds = MDSWriter(
            columns={"tokens": f"ndarray:{tokenizer.dtype}", "begins": "uint8"},
            out=str(folder),
            compression="zstd" if config.compression == "zstd" else None,
            hashes=[HASH],
            size_limit=config.shard_size,
        )
        self._records: list[NDArray[np.int64]] = []
        self._lengths: list[NDArray[np.int64]] = []
        self._unigram = np.zeros(tokenizer.vocab_size, np.int64)
        self._sources = np.zeros((len(config.sources), 3), np.int64)  # documents, tokens, bytes

    def add(self, piece: Piece, result: Path) -> None:
        with np.load(result) as stored:
            tokens, lengths = stored["tokens"], stored["lengths"]
        record_lengths: list[int] = []
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            for cut in range(0, len(document), RECORD_TOKENS):
                record = document[cut : cut + RECORD_TOKENS]
                self._mds.write({"tokens": record, "begins": np.uint8(cut == 0)})
                record_lengths.append(len(record))
        self._records.append(np.array(record_lengths))
        self._lengths.append(lengths)
        self._unigram += np.bincount(tokens, minlength=len(self._unigram))
        for column, values in enumerate((np.ones_like(lengths), lengths, piece.rows["bytes"].astype(np.int64))):
            np.add.at(self._sources[:, column], piece.sources, values)

    def finish(self) -> dict[str, Any]:
        """Ends the split and returns its part of `corpus.json`."""
        self._mds.finish()
        records = np.concatenate([[0], *self._records]).cumsum()
        lengths = np.concatenate(self._lengths)
        np.save(self._folder / "records.npy", records)
        np.save(self._folder / "documents.npy", np.cumsum(lengths) - lengths)
        np.save(self._folder / "unigram.npy", self._unigram)
        index = json.loads((self._folder / "index.json").read_text())
        documents, tokens, size = self._sources.sum(0).tolist()
        return {
            "documents": documents,
            "records": len(records) - 1,
            "tokens": tokens,
            "bytes": size,
            "shards": [shard["raw_data"]["hashes"][HASH] for shard in index["shards"]],
            "sources": [dict(zip(("documents", "tokens", "bytes"), row, strict=True)) for row in self._sources.tolist()],
        }


def _write_about(
    folder: Path, config: CorpusBuild, plan: str, tokenizer: _Tokenizer, splits: dict[str, Any], found: UnitSummary
) -> None:
    """`corpus.json`. The fingerprint is the digest of ``content``: the tokenizer, the unpacked shards, the build's
    parameters and statistics. Where the sources lay, or which zstd compressed the shards, is no part of it."""
    beside = ("index.json", "records.npy", "documents.npy", "unigram.npy")
    names = ["tokenizer.json", *(f"{split}/{name}" for split in splits for name in beside)]
    files = {name: file_digest(folder / name) for name in names}
    content = {
        "parameters": {
            "seed": config.seed,
            "held_out": config.held_out,
            "shard_size": config.shard_size,
            "record_tokens": RECORD_TOKENS,
            "sources": [{"kind": s.kind, "weight": s.weight} for s in config.sources],
        },
        "tokenizer": {
            "digest": files["tokenizer.json"],
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
        },
        "splits": splits,
    }
    about = {
        "format": FORMAT,
        "fingerprint": content_digest(content),
        "tokenizer": tokenizer.name,
        "sources": [s.path or s.kind for s in config.sources],
        "weights": "shares of UTF-8 bytes of the training split" if config.sources[0].weight else "every document once",
        "broken": {"lines": found.broken, "first": list(found.examples)},
        "empty": found.empty,
        "contaminated": found.contaminated,
        "plan": plan,
        "files": files,
        "content": content,
    }
    write_json(folder / "corpus.json", about)


def _report(splits: dict[str, Any], tokenizer: _Tokenizer, progress: Progress) -> None:
    for name in ("train", "validation"):
        s = splits[name]
        progress.note(
            f"{name}: {s['documents']:,} documents, {s['tokens']:,} tokens ({tokenizer.name}, "
            f"{s['bytes'] / s['tokens']:.2f} bytes each), {len(s['shards'])} shard{'s' * (len(s['shards']) > 1)}"
        )
