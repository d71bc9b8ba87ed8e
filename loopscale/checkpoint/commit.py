"""The commit protocol: a reader sees a whole checkpoint or none.

1. everything is written into ``step-N.writing``; 2. a manifest with the size and SHA-256 of every file is written and all
is flushed to disk; 3. the folder is renamed to ``step-N``; 4. only then are older checkpoints pruned. The newest
checkpoint is the highest N that has a manifest: there is no pointer that could disagree with it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from loopscale.durable import file_digest, sync, sync_tree
from loopscale.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
REQUIRED = ("state.json", "config.yaml", "tensors/.metadata")
"""What every checkpoint holds."""
_WRITING = ".writing"


def folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder to write step ``step`` into; leftovers of a save that was killed are removed."""
    for leftover in checkpoints.glob(f"step-*{_WRITING}"):
        shutil.rmtree(leftover)
    place = folder(checkpoints, step).with_name(f"step-{step}{_WRITING}")
    place.mkdir(parents=True)
    return place


def commit(writing: Path) -> Path:
    """Publishes what was written; returns the checkpoint's folder."""
    files = sorted(p for p in writing.rglob("*") if p.is_file())
    digests = {str(p.relative_to(writing)): {"size": p.stat().st_size, "sha256": file_digest(p)} for p in files}
    (writing / MANIFEST).write_text(json.dumps({"format": FORMAT_VERSION, "files": digests}, indent=1))
    sync_tree(writing)
    final = writing.with_name(writing.name.removesuffix(_WRITING))
    if final.exists():  # a run resumed from an earlier step comes by again
        shutil.rmtree(final)
    writing.rename(final)
    sync(final.parent)
    return final


def committed(checkpoints: Path) -> list[Path]:
    """Folders of committed checkpoints, newest first."""
    found = [
        (int(m[1]), p)
        for p in checkpoints.glob("step-*")
        if (m := re.fullmatch(r"step-(\d+)", p.name)) and (p / MANIFEST).is_file()
    ]
    return [p for _, p in sorted(found, reverse=True)]


def verify(checkpoint: Path) -> None:
    """Reads every file against the manifest; raises :class:`CheckpointError` that names the first damaged one."""
    if not (checkpoint / MANIFEST).is_file():
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has no {MANIFEST}"
            + (", its save was cut short" if checkpoint.name.endswith(_WRITING) else "")
        )
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        version, files = manifest["format"], {str(n): (int(f["size"]), str(f["sha256"])) for n, f in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {MANIFEST} cannot be read ({error})") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} has format {version}; this version of loopscale reads {FORMAT_VERSION}"
        )
    if missing := [name for name in REQUIRED if name not in files]:
        raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {MANIFEST} does not list {missing[0]}")
    for name, (expected_size, digest) in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {name} is missing")
        damaged, size = f"checkpoint {checkpoint.name} is damaged: {name} has", path.stat().st_size
        if size != expected_size:
            raise CheckpointError(f"{damaged} {size} bytes, the manifest says {expected_size}")
        if (found := file_digest(path)) != digest:
            raise CheckpointError(f"{damaged} digest {found[:8]}…, the manifest says {digest[:8]}…")


def prune(checkpoints: Path, keep: int, keep_every: int) -> list[Path]:
    """Removes all but the ``keep`` newest checkpoints and those at multiples of ``keep_every``; returns what went."""
    removed = []
    for path in committed(checkpoints)[keep:]:
        if keep_every and int(path.name.removeprefix("step-")) % keep_every == 0:
            continue
        (path / MANIFEST).unlink()  # first, so that a kill in the middle leaves no half checkpoint that looks whole
        shutil.rmtree(path)
        removed.append(path)
    return removed


def size(checkpoint: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file())
