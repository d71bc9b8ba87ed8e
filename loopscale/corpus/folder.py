"""A corpus as it says of itself: `corpus.json` and the small files beside it, local or behind a URL.

corpus.json              fingerprint, statistics, digests
tokenizer.json
train/, validation/      index.json and shard.*.mds[.zstd] of mosaicml-streaming, and
    records.npy          int64 [records + 1], first token of each record in the split's token stream, then the total
    documents.npy        int64 [documents], first token of each document
    unigram.npy          int64 [vocab_size], how often each token occurs
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscale.durable import content_digest, file_digest, locked
from loopscale.errors import DataError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1


@dataclass(frozen=True)
class Split:
    """Statistics of one split. ``bytes`` are UTF-8 bytes of text; ``shards`` the digests of the unpacked shards."""

    documents: int
    records: int
    tokens: int
    bytes: int
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """A complete corpus. ``home`` is the local folder of its files: its own, or the cache of a remote one."""

    location: str
    home: Path
    remote: str | None
    fingerprint: str
    tokenizer_name: str
    vocab_size: int
    end_of_text: int
    splits: Mapping[str, Split]
    files: Mapping[str, str]
    about: Mapping[str, Any]

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise UsageError(f"corpus {self.location} has no split {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]

    def file(self, name: str) -> Path:
        """A small file of the corpus, fetched if it is remote; raises :class:`DataError` if it is missing or damaged."""
        path = self.home / name
        if self.remote:
            _fetch(self.remote, name, self.home)
        if not path.is_file():
            raise DataError(f"corpus {self.location} is incomplete: {name} is missing; build it again (`loopscale corpus build`)")
        if file_digest(path) != self.files[name]:
            raise DataError(f"corpus {self.location} is damaged: {name} does not have the digest that corpus.json gives")
        return path

    def tokenizer(self) -> Tokenizer:
        from loopscale.corpus.tokenizer import load_tokenizer

        return load_tokenizer(self.file("tokenizer.json"))


def open_corpus(location: str | Path, cache: str | Path | None = None) -> Corpus:
    """Reads `corpus.json` of a local folder, or of a URL (or folder) whose files are then kept in ``cache``.

    Raises :class:`UsageError` when there is no corpus, :class:`DataError` when there is a damaged one.
    """
    location = str(location)
    if "://" in location and cache is None:
        raise UsageError(f"corpus {location} is a URL and needs a local folder for its shards: corpus.cache=FOLDER")
    if "://" not in location:
        _expect_folder(Path(location))
    if cache is None:
        return _parse(location, Path(location), None, _read_json(Path(location) / "corpus.json"))
    home = Path(cache)
    with locked(home / ".locks" / "corpus.json.lock"):
        return _open_cached(location, home)


def _expect_folder(folder: Path) -> None:
    """Says what to do when a local folder holds no corpus."""
    if (folder / "corpus.json").is_file():
        return
    if folder.exists():
        raise UsageError(f"{folder} is not a corpus: it has no corpus.json; make one with `loopscale corpus build CONFIG.yaml`")
    if building_folder(folder).exists():
        raise UsageError(f"corpus {folder} is not finished; the same `loopscale corpus build` goes on where it stopped")
    raise UsageError(f"corpus {folder} does not exist; make it with `loopscale corpus build CONFIG.yaml`")


def building_folder(output: Path) -> Path:
    """Where a corpus grows before it takes its name."""
    return output.with_name(output.name + ".building")


def _open_cached(remote: str, home: Path) -> Corpus:
    """The remote `corpus.json`, which must be the one whose shards the cache already holds, if any."""
    known = home / "corpus.json"
    newest = home / "corpus.json.newest"
    newest.unlink(missing_ok=True)
    _fetch(remote, "corpus.json", home, newest)
    corpus = _parse(remote, home, remote, _read_json(newest))
    if known.exists() and _read_json(known).get("fingerprint") != corpus.fingerprint:
        raise UsageError(f"cache {home} holds shards of another corpus than {remote}; give an empty folder as corpus.cache")
    newest.replace(known)
    return corpus


def _fetch(remote: str, name: str, home: Path, target: Path | None = None) -> None:
    """Copies a file of a remote corpus, unless it is there; several processes may ask at once."""
    from streaming.base.storage import CloudDownloader

    target = target or home / name
    with locked(home / ".locks" / f"{name.replace('/', '-')}.fetch"):
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        partial.unlink(missing_ok=True)
        try:
            CloudDownloader.direct_download(f"{remote.rstrip('/')}/{name}", str(partial))
        except Exception as error:  # each store raises its own kinds
            raise DataError(f"{remote}/{name} cannot be fetched ({type(error).__name__}: {error})") from error
        partial.replace(target)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not an object")
    return content


def _parse(location: str, home: Path, remote: str | None, about: dict[str, Any]) -> Corpus:
    if about.get("format") != FORMAT:
        raise DataError(f"corpus {location} has format {about.get('format')}, this version reads {FORMAT}; build it again")
    try:
        content = about["content"]
        if content_digest(content) != about["fingerprint"]:
            raise DataError(f"corpus {location} is damaged: corpus.json does not agree with its own fingerprint")
        splits = {
            name: Split(s["documents"], s["records"], s["tokens"], s["bytes"], tuple(s["shards"]))
            for name, s in content["splits"].items()
        }
        tokenizer = content["tokenizer"]
        return Corpus(
            location, home, remote, about["fingerprint"], about["tokenizer"], tokenizer["vocab_size"], tokenizer["end_of_text"],
            splits, about["files"], about,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"corpus {location} is damaged: corpus.json lacks {error}") from None
