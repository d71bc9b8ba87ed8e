"""The folder of a run: its name, what is written into it at the start, and where a resumed run finds its past.

config.yaml  manifest.json  code/          what runs, written at every start
metrics.jsonl  journal.jsonl  events/  wandb/   what it tells
crash.json  stuck.txt                 why it ended, and who waited for whom when a step took too long
skipped/step-N.json                        about a bad step
checkpoints/step-N/  checkpoints/best  evaluations/  report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
import yaml

import loopscale
from loopscale.checkpoint import store
from loopscale.checkpoint.commit import MANIFEST, Storage
from loopscale.checkpoint.restore import storage_of
from loopscale.config import Config
from loopscale.config.tree import Section
from loopscale.durable import replacing, write_json
from loopscale.errors import CheckpointError, UsageError
from loopscale.parallel.mesh import on_main
from loopscale.train.journal import last_saved

_PACKAGES = ("torch", "megatron-core", "deepspeed", "mosaicml-streaming", "numpy", "tokenizers", "transformers")


@dataclass(frozen=True)
class Place:
    """Where a run writes, and what it goes on from."""

    folder: Path
    checkpoint: Path | None = None
    passed_over: tuple[str, ...] = ()
    """A sentence for each damaged checkpoint."""


def choose(config: Config, stem: str, resume: str | None) -> Path:
    """The folder of a run; reads no checkpoint.

    ``resume`` is None (a new run), "auto" (this name's run, or a new one when there is none yet), or a run folder or
    checkpoint. Raises :class:`UsageError` when a new run would overwrite one, or ``resume`` names nothing.
    """
    runs = Path(config.run.folder)
    if resume not in (None, "auto"):
        return _explicit(Path(resume), config)
    named = config.run.name
    if resume == "auto":
        folder = runs / named if named else next(iter(sorted(runs.glob(f"{stem}-[0-9]*"), reverse=True)), None)
        if folder is not None and folder.is_dir():
            return folder
    folder = runs / (named or f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    if resume is None and (folder / "config.yaml").exists():
        raise UsageError(f"{folder} already holds a run; go on with --resume auto, or give another run.name")
    return folder


def _explicit(path: Path, config: Config) -> Path:
    whole = _is_checkpoint(path)
    if not whole and not (path / "checkpoints").is_dir():
        raise UsageError(
            f"--resume {path} is neither a run folder nor a checkpoint of one (runs/NAME or runs/NAME/checkpoints/step-N)"
        )
    folder = path.parent.parent if whole else path
    if config.run.name not in (None, folder.name):
        raise UsageError(
            f"--resume {path} belongs to the run {folder.name}, and run.name is {config.run.name}; leave run.name out to go "
            f"on with that run, or use --init {path} to start a new one from its weights"
        )
    return folder


def past(folder: Path, config: Config, resume: str | None, group: dist.ProcessGroup | None = None) -> Place:
    """What the run in ``folder`` goes on from, verified: nothing, the named checkpoint, or the newest whole one. A collective of
    ``group``.

    A run that was killed before its first checkpoint starts again under "auto". Raises :class:`CheckpointError` when
    there are checkpoints but none is whole, :class:`UsageError` when a run named by its path has none.
    """
    if resume is None:
        return Place(folder)
    if resume != "auto" and _is_checkpoint(Path(resume)):
        store.verify(Path(resume), group)
        return Place(folder, Path(resume))
    storage = storage_of(folder, config.checkpoint.folder)
    checkpoint, passed_over = store.newest_whole(storage, config.checkpoint.on_damage, folder / "fetched", group)
    if checkpoint is None and passed_over:
        raise CheckpointError(
            f"none of the {len(passed_over)} checkpoints of {folder} is whole ({passed_over[0]}); remove that folder to start "
            f"again from nothing, or give another run.name"
        )
    if checkpoint is None and (saved := on_main(lambda: last_saved(folder), group)):
        raise UsageError(
            f"{folder} has saved step {saved}, but there is no checkpoint in {storage.where}; bring them back, name their place "
            f"in checkpoint.folder, or remove {folder} to start again from nothing"
        )
    if checkpoint is None and resume != "auto":
        raise UsageError(f"--resume {resume}: the run has no checkpoint yet; --resume auto would start it again")
    return Place(folder, checkpoint, tuple(passed_over))


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() and path.parent.name == "checkpoints"


def claim(folder: Path) -> TextIO:
    """Takes the run folder for this process, until the file is closed or the process ends, however it ends.

    Raises :class:`UsageError` when another process is training there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+")
    if not _locked(file):
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UsageError(f"{folder} is being trained by {owner}; stop it first, or give another run.name") from None
    with contextlib.suppress(OSError):  # a full disk; who holds it is a courtesy
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def _locked(file: TextIO, tries: int = 5) -> bool:
    """Takes the lock; whoever only looks whether it is free has it for an instant."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1 if left else 0)
        else:
            return True
    return False


def drop_empty(folder: Path) -> None:
    """Removes the folder of a run that did not come to a start."""
    inside = {path.name for path in folder.rglob("*")}
    if inside <= {".lock", "checkpoints"}:
        shutil.rmtree(folder)


def set_aside_later(storage: Storage, step: int) -> list[str]:
    """Renames checkpoints beyond ``step``: the run that goes on from there has another future than theirs."""
    return [storage.set_aside(later) for later in storage.steps() if later > step]


def describe(folder: Path, config: Config, origins: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Writes config, manifest and a snapshot of the code that runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "config.yaml") as file:
        file.write(config_text(config).encode())
    manifest = {
        "name": folder.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "loopscale": loopscale.__version__,
            "python": platform.python_version(),
            **{p: metadata.version(p) for p in _PACKAGES},
        },
        "machine": {"platform": platform.platform(), "processor": platform.machine()},
        "command": sys.argv,
        "git": _git(Path(loopscale.__file__).parent),
        "seed": config.run.seed,
        "origins": dict(origins),
        **facts,
    }
    write_json(folder / "manifest.json", manifest)
    snapshot(folder)


def snapshot(folder: Path) -> None:
    """Copies the package to ``folder``/code, for whoever asks later what ran, or runs it again, unless it runs from there."""
    package, code = Path(loopscale.__file__).parent, folder / "code"
    if package.parent.resolve() != code.resolve():
        shutil.rmtree(code, ignore_errors=True)
        shutil.copytree(package, code / "loopscale", ignore=shutil.ignore_patterns("__pycache__"))


def config_text(config: Section) -> str:
    """The resolved tree as YAML that loads again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _git(package: Path) -> dict[str, Any]:
    """Revision and uncommitted changes of the checkout that the package runs from, if it is one."""

    def run(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    revision = run("rev-parse", "HEAD") if run("ls-files", "--error-unmatch", "__init__.py") else None
    diff = run("diff", "HEAD", "--", ".") if revision else None
    return {"revision": revision, "dirty": bool(diff), "diff": diff or ""}
