"""The commit protocol: a reader sees a whole checkpoint or none.

1. Every rank writes its files into ``step-N.writing``; 2. rank 0 writes a manifest with the size and SHA-256 of every file,
and all is flushed to disk; 3. the folder is renamed to ``step-N``; 4. only then are older checkpoints pruned. A checkpoint
is a folder ``step-N`` that has a manifest, and the newest has the highest N: there is no pointer that could disagree.

An object store has no rename. There the files are sent to ``step-N`` one by one, each as soon as it is whole, and the
manifest last.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from loopscale.durable import file_digest, replacing, sync, sync_tree
from loopscale.errors import CheckpointError, UsageError

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
REQUIRED = ("state.json", "config.yaml", "tensors/index.json")
"""What every checkpoint holds."""
PROBED = 4096
"""Bytes that are written to see whether it can be done."""
MANIFEST_BYTES = 2**24
"""A manifest that is larger is none of ours: some 120,000 files."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
"""Of a file in a checkpoint: no part of it begins with a dot or is empty, so that it leads nowhere else."""
_WRITING = ".writing"
READERS = 4
"""Files that a rank verifies at once."""


@dataclass(frozen=True)
class File:
    """A file of a checkpoint, named by its path in it."""

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, name: str) -> File:
        path = folder / name
        return cls(name, path.stat().st_size, file_digest(path))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds; ``facts`` are JSON-able, for whoever chooses among checkpoints."""

    files: tuple[File, ...]
    facts: Mapping[str, Any]

    @classmethod
    def parse(cls, text: bytes, name: str) -> Manifest:
        """The manifest of the checkpoint called ``name``; raises :class:`CheckpointError` when it makes no sense."""
        try:
            content = json.loads(text)
            version, facts = content["format"], dict(content.get("facts", {}))
            files = tuple(File(str(n), int(f["size"]), str(f["sha256"])) for n, f in content["files"].items())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {name} is damaged: {MANIFEST} cannot be read ({error})") from None
        if not isinstance(version, int):
            raise CheckpointError(f"checkpoint {name} is damaged: the format in its {MANIFEST} is not a whole number")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {name} has format {version}; this version of loopscale reads {FORMAT_VERSION}: use a "
                f"{'newer' if version > FORMAT_VERSION else 'older'} one"
            )
        if missing := [required for required in REQUIRED if required not in {f.name for f in files}]:
            raise CheckpointError(f"checkpoint {name} is damaged: {MANIFEST} does not list {missing[0]}")
        for file in files:
            if not _NAME.fullmatch(file.name):
                raise CheckpointError(
                    f"checkpoint {name} is refused: {MANIFEST} lists {file.name!r}, which cannot be a file within the checkpoint"
                )
        return cls(files, facts)

    def dump(self) -> str:
        files = {f.name: {"size": f.size, "sha256": f.sha256} for f in self.files}
        return json.dumps({"format": FORMAT_VERSION, "facts": self.facts, "files": files}, indent=1)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)


class Storage(Protocol):
    """Where the checkpoints of a run are. Steps name them."""

    where: str
    """The folder or URL."""

    def probe(self) -> None:
        """Writes something there, and removes it; raises OSError where that fails."""

    def steps(self) -> list[int]:
        """Of committed checkpoints, newest first."""

    def manifest(self, step: int) -> Manifest:
        """Raises :class:`CheckpointError` when it cannot be read."""

    def begin(self, step: int) -> None:
        """Removes what is left of saves that were killed, and what stands in the way; on rank 0."""

    def free(self) -> float:
        """Bytes that may be written."""

    def writing(self, step: int) -> Path:
        """The folder that this rank writes into."""

    def deliver(self, step: int, name: str) -> None:
        """``name`` in that folder is whole and on disk."""

    def publish(self, step: int) -> None:
        """All files have been delivered, the manifest is written: the checkpoint appears; on rank 0."""

    def abandon(self, step: int) -> None:
        """Removes what was written of a checkpoint that cannot be finished; on rank 0."""

    def remove(self, step: int) -> None:
        """A kill in the midst of it leaves nothing that looks whole."""

    def set_aside(self, step: int) -> str:
        """Makes a checkpoint one that is not found any more, without losing it; returns its new name."""

    def point_at_best(self, step: int) -> None:
        """Lets the name ``best`` stand for a checkpoint, where there are links."""

    def fetch(self, step: int, cache: Path) -> Path:
        """The checkpoint as a folder of this machine, below ``cache`` if it is not one already; its files not verified."""


class Folder:
    """Checkpoints in a folder that all ranks see."""

    def __init__(self, folder: Path):
        self.folder, self.where = folder, str(folder)

    def probe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / ".probe") as out:
            out.write(bytes(PROBED))
        (self.folder / ".probe").unlink()

    def steps(self) -> list[int]:
        found = (step_of(p.name) for p in self.folder.glob("step-*") if (p / MANIFEST).is_file())
        return sorted((step for step in found if step is not None), reverse=True)

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self._place(step))

    def begin(self, step: int) -> None:
        for leftover in self.folder.glob(f"step-*{_WRITING}"):
            shutil.rmtree(leftover)
        (self.writing(step) / "tensors").mkdir(parents=True)

    def free(self) -> float:
        return shutil.disk_usage(self.folder).free

    def writing(self, step: int) -> Path:
        return self.folder / f"step-{step}{_WRITING}"

    def deliver(self, step: int, name: str) -> None:
        pass

    def publish(self, step: int) -> None:
        writing, final = self.writing(step), self._place(step)
        sync_tree(writing)
        if final.exists():  # a run resumed from an earlier step comes by again
            shutil.rmtree(final)
        writing.rename(final)
        sync(self.folder)

    def abandon(self, step: int) -> None:
        shutil.rmtree(self.writing(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        (self._place(step) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self._place(step), ignore_errors=True)

    def set_aside(self, step: int) -> str:
        target = self.folder / f"step-{step}.superseded"
        shutil.rmtree(target, ignore_errors=True)
        return self._place(step).rename(target).name

    def point_at_best(self, step: int) -> None:
        link = self.folder / ".best.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(f"step-{step}")
        best = self.folder / "best"
        if best.is_dir() and not best.is_symlink():  # the run was copied by something that follows links
            shutil.rmtree(best)
        link.replace(best)

    def fetch(self, step: int, cache: Path) -> Path:
        return self._place(step)

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step}"


class ObjectStore:
    """Checkpoints below a URL that fsspec knows (s3://…, gs://…). Each rank keeps the file that it writes on its own disk until
    it is sent."""

    def __init__(self, url: str):
        self.url = self.where = url.rstrip("/")

    def probe(self) -> None:
        with self._reached() as (files, root):
            files.pipe_file(f"{root}/probe", bytes(PROBED))
            files.rm_file(f"{root}/probe")

    @cached_property
    def _files(self) -> tuple[Any, str]:
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{self.url} cannot be reached: {error}") from None

    @cached_property
    def _spool(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="loopscale-")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """The file system and the path on it; what goes wrong there, in whatever library's terms, is an OSError."""
        files, root = self._files
        try:
            yield files, root
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {error}") from error

    def steps(self) -> list[int]:
        with self._reached() as (files, root):
            files.invalidate_cache()
            found = (step_of(PurePosixPath(path).parts[-2]) for path in files.glob(f"{root}/step-*/{MANIFEST}"))
            return sorted((step for step in found if step is not None), reverse=True)

    def manifest(self, step: int) -> Manifest:
        with self._reached() as (files, root):
            text = files.cat_file(f"{root}/step-{step}/{MANIFEST}", end=MANIFEST_BYTES)
        return Manifest.parse(text, f"step-{step}")

    def begin(self, step: int) -> None:
        self.remove(step)

    def free(self) -> float:
        return float("inf")

    def writing(self, step: int) -> Path:
        place = Path(self._spool.name) / f"step-{step}"
        (place / "tensors").mkdir(parents=True, exist_ok=True)
        return place

    def deliver(self, step: int, name: str) -> None:
        path = self.writing(step) / name
        with self._reached() as (files, root):
            files.put_file(str(path), f"{root}/step-{step}/{name}")
        path.unlink()

    def publish(self, step: int) -> None:
        self.deliver(step, MANIFEST)

    def abandon(self, step: int) -> None:
        shutil.rmtree(self.writing(step), ignore_errors=True)
        with contextlib.suppress(OSError):  # what has been sent waits for the next save of this step
            self.remove(step)

    def remove(self, step: int) -> None:
        with self._reached() as (files, root):
            place = f"{root}/step-{step}"
            files.invalidate_cache()
            if files.exists(f"{place}/{MANIFEST}"):
                files.rm_file(f"{place}/{MANIFEST}")
            if files.exists(place):
                files.rm(place, recursive=True)

    def set_aside(self, step: int) -> str:
        with self._reached() as (files, root):
            files.mv(f"{root}/step-{step}/{MANIFEST}", f"{root}/step-{step}/superseded.json")
        return f"step-{step}/superseded.json"

    def point_at_best(self, step: int) -> None:
        pass

    def fetch(self, step: int, cache: Path) -> Path:
        place = cache / f"step-{step}"
        shutil.rmtree(place, ignore_errors=True)
        names = (MANIFEST, *(file.name for file in self.manifest(step).files))
        with self._reached() as (files, root):
            for name in names:
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # verification names it
                    files.get_file(f"{root}/step-{step}/{name}", str(place / name))
        return place


def step_of(name: str) -> int | None:
    """The step of a committed checkpoint's folder; None for other names."""
    found = re.fullmatch(r"step-(\d+)", name)
    return int(found[1]) if found else None


def storage_at(location: str | Path) -> Storage:
    """The checkpoints in a folder, or below a URL."""
    scheme, _, path = str(location).rpartition("://")
    return ObjectStore(str(location)) if scheme not in ("", "file", "local") else Folder(Path(path).expanduser())


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint's folder; raises :class:`CheckpointError` when there is none or it makes no sense."""
    path = checkpoint / MANIFEST
    if not checkpoint.exists():
        raise UsageError(f"{checkpoint} does not exist")
    if (checkpoint / "metrics.jsonl").exists():
        raise UsageError(f"{checkpoint} is a run; name one of its checkpoints, such as {checkpoint / 'checkpoints' / 'best'}")
    if not path.is_file():
        cut = ", its save was cut short" if checkpoint.name.endswith(_WRITING) else ""
        raise CheckpointError(f"{checkpoint} is not a whole checkpoint: it has no {MANIFEST}{cut}")
    return Manifest.parse(read_small(checkpoint, MANIFEST, MANIFEST_BYTES), checkpoint.name)


def read_small(checkpoint: Path, name: str, limit: int) -> bytes:
    """A file of a checkpoint that is read whole; raises :class:`CheckpointError` when it cannot be, or has more than ``limit``
    bytes, as none of ours has."""
    try:
        with (checkpoint / name).open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {name} cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise CheckpointError(f"checkpoint {checkpoint.name} is refused: its {name} has more than {limit / 1e6:.1f} MB")
    return content


def damage(checkpoint: Path, files: Iterable[File]) -> str | None:
    """Reads ``files`` of a checkpoint against what its manifest says, a few at once; a sentence on the first one that is
    damaged, or is a link to what does not belong to the checkpoint."""
    with ThreadPoolExecutor(READERS) as pool:
        return next(filter(None, pool.map(partial(_damage, checkpoint), files)), None)


def _damage(checkpoint: Path, file: File) -> str | None:
    path = checkpoint / file.name
    if not path.is_file():
        return f"checkpoint {checkpoint.name} is damaged: {file.name} is missing"
    if not path.resolve().is_relative_to(checkpoint.resolve()):
        return f"checkpoint {checkpoint.name} is refused: {file.name} is a link to outside of it"
    if (size := path.stat().st_size) != file.size:
        return f"checkpoint {checkpoint.name} is damaged: {file.name} has {size} bytes, the manifest says {file.size}"
    if (found := file_digest(path)) != file.sha256:
        said = f"the manifest says {file.sha256[:8]}…"
        return f"checkpoint {checkpoint.name} is damaged: {file.name} has digest {found[:8]}…, {said}"
    return None


def best_first(scores: Mapping[int, float]) -> list[int]:
    """Steps by their score, the lowest first; of equal ones the newest."""
    return sorted(scores, key=lambda step: (scores[step], -step))


def outlived(steps: Sequence[int], scores: Mapping[int, float], keep: int, keep_every: int, keep_best: int) -> list[int]:
    """Steps, of those committed, whose checkpoints may go: all but the ``keep`` newest, multiples of ``keep_every``, and the
    ``keep_best`` with the lowest score."""
    newest = sorted(steps, reverse=True)[:keep]
    best = best_first({s: scores[s] for s in steps if s in scores})[:keep_best]
    return [s for s in sorted(steps) if s not in newest and s not in best and not (keep_every and s % keep_every == 0)]
