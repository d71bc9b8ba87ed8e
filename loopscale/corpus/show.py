"""`loopscale corpus inspect`: what a corpus holds, and samples as a run would read them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TextIO

from loopscale.corpus.folder import Corpus
from loopscale.corpus.order import Order
from loopscale.corpus.packing import IGNORED, PackedCorpus, Sample
from loopscale.errors import UsageError

BOUNDARY = "⟦document⟧"


def inspect(
    location: str | Path,
    *,
    split: str = "train",
    count: int = 3,
    sequence_length: int = 128,
    seed: int | None = None,
    shuffle_block: int = 65_536,
    cache: str | Path | None = None,
    out: TextIO | None = None,
) -> None:
    """Prints statistics of the corpus and ``count`` decoded samples: the first stored, or with a ``seed`` the first
    that a run of that seed reads. ``⟦document⟧`` marks where a document begins inside a sample.

    Raises :class:`UsageError` when there is no corpus or no such split, :class:`DataError` when it is damaged.
    """
    if count < 0 or sequence_length < 1:
        raise UsageError(f"count is {count} and sequence_length {sequence_length}; give at least 0 and 1")
    packed = PackedCorpus(location, split, sequence_length, cache=cache)
    order = None if seed is None else Order(len(packed), seed, shuffle_block)
    lines = _statistics(packed.corpus)
    lines.append(f"{len(packed):,} samples of {sequence_length} tokens in {split}")
    for number in range(min(count, len(packed))):
        index = number if order is None else order[number]
        lines += ["", _describe(packed, index)]
    print("\n".join(lines), file=out or sys.stdout)


def _statistics(corpus: Corpus) -> list[str]:
    about = corpus.about
    lines = [
        f"corpus       {corpus.location}",
        f"fingerprint  {corpus.fingerprint}",
        f"tokenizer    {corpus.tokenizer_name}, {corpus.vocab_size:,} entries, documents end with id {corpus.end_of_text}",
        f"mixture      {about['weights']}",
    ]
    for name, split in corpus.splits.items():
        lines.append(
            f"{name:<12} {split.documents:,} documents, {split.tokens:,} tokens, {split.bytes:,} bytes "
            f"({split.bytes / split.tokens:.2f} per token), {split.records:,} records in {len(split.shards):,} shards"
        )
        if len(about["sources"]) > 1:
            for source, part in zip(about["sources"], about["content"]["splits"][name]["sources"], strict=True):
                lines.append(f"  {source}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes")
    if about["broken"]["lines"]:
        lines.append(f"left out     {about['broken']['lines']:,} broken lines, first: {about['broken']['first'][0]}")
    if about["contaminated"]:
        lines.append(f"left out     {about['contaminated']:,} documents that share 13 words with evaluation files")
    return lines


def _describe(packed: PackedCorpus, index: int) -> str:
    sample = packed[index]
    masked = int((sample.targets == IGNORED).sum())
    begin = index * packed.sequence_length
    head = f"sample {index:,} · tokens {begin:,} to {begin + packed.sequence_length:,} · {masked} targets masked"
    return f"{head}\n{_marked(packed, sample)}"


def _marked(packed: PackedCorpus, sample: Sample) -> str:
    """The inputs as text, a mark before each document."""
    tokenizer = packed.corpus.tokenizer()
    edges = [*sample.starts.tolist(), len(sample.targets)]
    parts = [tokenizer.decode(sample.tokens[a:b].tolist()) for a, b in itertools.pairwise(edges)]
    return f"\n{BOUNDARY}\n".join(parts)
