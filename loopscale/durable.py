"""Files that appear whole or not at all, and locks that die with their holder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the name ``path``, on disk to its last byte, when the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if error.filename is None or str(error.filename) == str(partial):
            error.filename = str(path)  # a full disk is told without a name; what the block reads has its own
        raise
    os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as out:
        out.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def finite(content: Any) -> Any:
    """JSON content with None for every number that is not finite, for which JSON has no word."""
    if isinstance(content, Mapping):
        return {key: finite(each) for key, each in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(each) for each in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock on the file ``path``; yields False when another process has it and ``wait`` is False.

    The kernel frees the lock when its holder dies, however it dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def sync_tree(folder: Path) -> None:
    """Brings a folder and all in it to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Brings one file, or the names in one folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(content: Any) -> str:
    """SHA-256 of JSON content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
