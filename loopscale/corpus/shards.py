"""Records of a split, read at random through mosaicml-streaming, by any number of unrelated processes.

Streaming's `Stream` fetches, unpacks and checks shards and its readers decode them. Its `StreamingDataset` is not
used: that knows one flat world, takes part in barriers of it when it is made (so ranks that do not read would have to
make one too), and numbers its shared memory by node, which a killed run leaves behind and two runs fight over. What
it adds is an order of samples, and ours does not depend on ranks. Here processes meet only in file locks, which die
with their holder. Corpora remain readable by `StreamingDataset`.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscale.corpus.folder import Corpus
from loopscale.durable import file_digest, locked
from loopscale.errors import DataError

_KEPT_RECORDS = 256


class Shards:
    """``shards[i]``: tokens of record ``i``, of the corpus's own unsigned type, shape [length].

    A shard is fetched and unpacked when first read, and checked once per process if ``verify``. Raises
    :class:`DataError` that names the file when a shard is missing, damaged or cannot be unpacked.
    """

    def __init__(self, corpus: Corpus, split: str, verify: bool):
        from streaming import Stream
        from streaming.base.world import World

        self._corpus, self._split, self._verify = corpus, split, verify
        index = corpus.file(f"{split}/index.json")
        self._stream = Stream(
            remote=corpus.remote,
            local=str(corpus.home),
            split=split,
            download_retry=2,
            download_timeout=600.0,
            validate_hash="sha256" if verify else None,
            keep_zip=False,  # of what was fetched; a corpus read in place keeps its compressed shards
        )
        alone = World(num_nodes=1, ranks_per_node=1, workers_per_rank=1, worker=0)
        self._readers: list[Any] = [*self._stream.get_shards(alone, allow_unsafe_types=False)]
        if [r.raw_data.hashes.get("sha256") for r in self._readers] != list(corpus.split(split).shards):
            raise DataError(f"corpus {corpus.location} is damaged: {index} lists other shards than corpus.json")
        self._first = np.cumsum([0, *(r.samples for r in self._readers)])
        self._ready: set[int] = set()
        self._recent: OrderedDict[int, NDArray[np.unsignedinteger[Any]]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, record: int) -> NDArray[np.unsignedinteger[Any]]:
        if record in self._recent:
            self._recent.move_to_end(record)
            return self._recent[record]
        shard = int(np.searchsorted(self._first, record, side="right")) - 1
        if shard not in self._ready:
            self._prepare(shard)
            self._ready.add(shard)
        tokens: NDArray[np.unsignedinteger[Any]] = self._readers[shard][record - int(self._first[shard])]["tokens"]
        self._recent[record] = tokens
        if len(self._recent) > _KEPT_RECORDS:
            self._recent.popitem(last=False)
        return tokens

    def _prepare(self, shard: int) -> None:
        """Brings the unpacked shard to disk and checks it; one process at a time."""
        reader = self._readers[shard]
        raw = self._corpus.home / self._split / reader.raw_data.basename
        named = f"shard {self._split}/{(reader.zip_data or reader.raw_data).basename} of corpus {self._corpus.location}"
        if self._corpus.remote or not raw.exists():  # what is unpacked in place needs no lock, so no writable folder
            try:
                with locked(self._corpus.home / ".locks" / f"{self._split}-{raw.name}.lock"):
                    self._stream.prepare_shard(reader)
            except Exception as error:  # streaming and each store raise their own kinds
                raise DataError(f"{named} {_reason(error)}") from error
        if self._verify:
            self._check(reader, raw, named)

    def _check(self, reader: Any, raw: Path, named: str) -> None:
        """Streaming checks what it unpacks or fetches; this checks what was there already."""
        if file_digest(raw) == reader.raw_data.hashes["sha256"]:
            return
        remedy = "remove that file, it is made again" if reader.zip_data or self._corpus.remote else "build the corpus again"
        raise DataError(f"{named} is damaged: {raw} does not have the digest that index.json gives; {remedy}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return f"cannot be unpacked in place ({error}); give a folder for it: corpus.cache=FOLDER"
    return f"is damaged: {error}" if "Checksum failure" in str(error) else f"cannot be read: {error}"
