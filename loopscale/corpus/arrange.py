"""Which document goes where: split, mixture and order, from keyed digests. Pure numpy.

The read stage leaves one row per document (:data:`ROW`). Everything here is a function of these rows, whatever
processes read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscale.corpus.documents import Document
from loopscale.errors import DataError

PIECE_BYTES = 1 << 22
"""Text that is tokenized at once; the unit of work and of resuming."""

ROW = np.dtype([("split", "<u8"), ("order", "<u8"), ("offset", "<u8"), ("bytes", "<u8")])
"""A document: two keyed digests, and where its text lies in its unit's text file."""


def digests(document: Document, raw: bytes, source: int, seed: int) -> tuple[int, int]:
    """(split, order) of a document, 64 bits each, keyed by the seed.

    The first is of the text alone, so equal texts are always on the same side of the split. The second adds the
    document's place, so equal texts do not lie side by side.
    """
    key = hashlib.sha256(str(seed).encode()).digest()
    content = hashlib.blake2b(raw, digest_size=16, key=key).digest()
    place = f"{source}\0{document.name}\0{document.number}\0".encode()
    order = hashlib.blake2b(place + content, digest_size=8, key=key).digest()
    return int.from_bytes(content[:8], "little"), int.from_bytes(order, "little")


@dataclass(frozen=True)
class Piece:
    """Documents that are tokenized together, in the order in which the corpus holds them.

    ``rows`` are of dtype ROW; ``units`` and ``sources`` (int64) tell each document's unit and source.
    """

    split: str
    rows: NDArray[np.void]
    units: NDArray[np.int64]
    sources: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        return int(self.rows["bytes"].sum())


def arrange(
    rows: NDArray[np.void], units: NDArray[np.int64], sources: NDArray[np.int64], held_out: float, weights: Sequence[float] | None
) -> list[Piece]:
    """Pieces of the validation and the training split, each in keyed order; raises :class:`DataError` if one is empty."""
    validation = _held_out(rows["split"], held_out)
    train = np.flatnonzero(~validation)
    copies = np.zeros(len(train), np.int64)
    if weights is not None:
        train, copies = _mix(train, rows, sources, weights)
    order = np.argsort(_mixed_bits(rows["order"][train], copies), kind="stable")
    ordered = {"validation": np.flatnonzero(validation), "train": train[order]}
    ordered["validation"] = ordered["validation"][np.argsort(rows["order"][ordered["validation"]], kind="stable")]
    return [
        Piece(split, rows[part], units[part], sources[part])
        for split, members in ordered.items()
        for part in _parts(members, rows["bytes"][members])
    ]


def _held_out(split: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Documents whose keyed digest falls below the share; at least one text on either side."""
    distinct = np.unique(split)
    if len(distinct) < 2:
        raise DataError(f"the sources hold {len(distinct)} different documents; at least 2 are needed, one for validation")
    threshold = np.uint64(min(share * 2.0**64, 2.0**64 - 2048))
    if not distinct[0] < threshold:
        threshold = distinct[1]
    elif distinct[-1] < threshold:
        threshold = distinct[-1]
    return split < threshold


def _mix(
    train: NDArray[np.int64], rows: NDArray[np.void], sources: NDArray[np.int64], weights: Sequence[float]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Training documents after sub- and over-sampling, and the number of each one's copy.

    Weights are shares of UTF-8 bytes of the training split, which stays as large as all sources together: a source
    of B of the total T bytes and share p is taken p·T/B times, whole copies first and then a keyed part.
    """
    size = np.bincount(sources[train], weights=rows["bytes"][train], minlength=len(weights))
    empty = np.flatnonzero(size == 0)
    if len(empty):
        raise DataError(f"source {empty[0] + 1} has weight {weights[empty[0]]:g} and no training documents")
    shares = np.asarray(weights) / np.sum(weights)
    times = (shares * size.sum() / size)[sources[train]]
    draw = _mixed_bits(rows["order"][train], np.full(len(train), -1)) / 2.0**64
    copies = np.floor(times).astype(np.int64) + (draw < times % 1)
    number = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    return np.repeat(train, copies), number


def _mixed_bits(digest: NDArray[np.uint64], copy: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A new 64-bit digest for each (digest, copy): the finaliser of SplitMix64 (Steele et al., 2014)."""
    z: NDArray[np.uint64] = digest + copy.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _parts(members: NDArray[np.int64], sizes: NDArray[np.uint64]) -> list[NDArray[np.int64]]:
    """Consecutive members of about PIECE_BYTES of text each."""
    if not len(members):
        return []
    number = (np.cumsum(sizes, dtype=np.int64) - sizes.astype(np.int64)) // PIECE_BYTES
    return np.split(members, np.flatnonzero(np.diff(number)) + 1)
