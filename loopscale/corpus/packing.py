"""Packing: sample i of a split, the same tokens with the same document boundaries for ever, whoever reads it.

A split is one stream of tokens, its documents in stored order, each ended by the end-of-text token. Sample i of
sequence length S is tokens [iS, iS + S + 1): S inputs and, one further, S targets. So there are (tokens - 1) // S
samples, every token but the first is a target once, and nothing depends on who reads or in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from loopscale.corpus.documents import Broken, open_bytes, text_of
from loopscale.corpus.folder import open_corpus
from loopscale.corpus.shards import Shards
from loopscale.errors import DataError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORED = -100
"""Target of a position that is not predicted."""


@dataclass(frozen=True)
class Sample:
    """``tokens`` int64 [S+1]; ``starts`` int64, input positions at which a document begins (0 always counts as one);
    ``targets`` int64 [S], the next token, or -100 where that is the first token of another document."""

    tokens: torch.Tensor
    starts: torch.Tensor
    targets: torch.Tensor


class PackedCorpus:
    """Samples of one split: ``len(packed)``, ``packed[i] -> Sample``.

    Raises :class:`UsageError` when there is no such corpus or split, :class:`DataError` when it is damaged or holds
    less than one sample.
    """

    def __init__(
        self, location: str | Path, split: str, sequence_length: int, *, cache: str | Path | None = None, verify: bool = True
    ):
        self.corpus = open_corpus(location, cache)
        self.split = split
        self.sequence_length = sequence_length
        self.tokens = self.corpus.split(split).tokens
        if self.tokens <= sequence_length:
            raise DataError(
                f"split {split} of corpus {location} has {self.tokens:,} tokens, less than one sample; "
                f"choose corpus.sequence_length below that, or build a larger corpus"
            )
        self._shards = Shards(self.corpus, split, verify)
        self._records = np.load(self.corpus.file(f"{split}/records.npy"), mmap_mode="r")
        self._documents = np.load(self.corpus.file(f"{split}/documents.npy"), mmap_mode="r")

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def eos(self) -> int:
        return self.corpus.end_of_text

    def __len__(self) -> int:
        return (self.tokens - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        tokens, boundaries = self.window(index)
        return Sample(*map(torch.from_numpy, (tokens, starts_of(tokens, boundaries), targets_of(tokens, boundaries))))

    def window(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [S+1] of sample ``index`` and the positions in 1..S at which a document begins."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin = index * self.sequence_length
        end = begin + self.sequence_length + 1
        first, last = np.searchsorted(self._documents, [begin + 1, end])
        return self.read(begin, end), self._documents[first:last] - begin

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Tokens [begin, end) of the split's stream, across records."""
        record = int(np.searchsorted(self._records, begin, side="right")) - 1
        parts = []
        while begin < end:
            offset = int(self._records[record])
            part = self._shards[record][begin - offset : end - offset]
            parts.append(part)
            begin += len(part)
            record += 1
        return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)

    def document_starts(self, end: int) -> NDArray[np.int64]:
        """First tokens, in the stream, of the documents that begin before ``end``."""
        return np.array(self._documents[: np.searchsorted(self._documents, end)])

    def unigram_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the split, [vocab_size]."""
        counts: NDArray[np.int64] = np.load(self.corpus.file(f"{self.split}/unigram.npy"))
        return counts


def starts_of(tokens: NDArray[np.int64], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Input positions at which a document begins, 0 included; ``boundaries`` as of :meth:`PackedCorpus.window`."""
    return np.concatenate([[0], boundaries[boundaries < len(tokens) - 1]])


def targets_of(tokens: NDArray[np.int64], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Next tokens, -100 where a document begins: nothing before it tells how the next one will."""
    targets = tokens[1:].copy()
    targets[boundaries - 1] = IGNORED
    return targets


def pack_text(source: str | Path, tokenizer: Tokenizer, eos: int, sequence_length: int) -> list[Sample]:
    """Samples of a text (``str``) or of a text file (``Path``; also .gz, .zst) as one document.

    Windows do not overlap and every token but the first is a target once; the last window is filled with ``eos``,
    whose targets are -100. Raises :class:`UsageError` for a missing file, :class:`DataError` for one that is not text.
    """
    ids = tokenizer.encode(_text(source), add_special_tokens=False).ids
    count = max(1, -(-len(ids) // sequence_length))  # ids and one end-of-text give len(ids) targets
    stream = np.full(count * sequence_length + 1, eos, np.int64)
    stream[: len(ids)] = ids
    samples = []
    for begin in range(0, len(stream) - 1, sequence_length):
        tokens = stream[begin : begin + sequence_length + 1]
        targets = tokens[1:].copy()
        targets[max(0, len(ids) - begin) :] = IGNORED
        samples.append(Sample(torch.from_numpy(tokens), torch.zeros(1, dtype=torch.int64), torch.from_numpy(targets)))
    return samples


def _text(source: str | Path) -> str:
    if isinstance(source, str):
        return source
    if not source.is_file():
        raise UsageError(f"text file {source} does not exist")
    with open_bytes(source) as stream:
        text = text_of(stream.read(), str(source))
    if isinstance(text, Broken):
        raise DataError(f"text file {text.where} {text.reason}")
    return text
