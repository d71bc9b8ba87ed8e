"""The folder of a run: its name, what is written into it at the start, and where a resumed run finds its past.

config.yaml  manifest.json  code/          what runs, written at every start
metrics.jsonl  journal.jsonl  events/  wandb/   what it tells
checkpoints/step-N/  evaluations/  report.html
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import loopscale
from loopscale.checkpoint import commit, store
from loopscale.config import Config
from loopscale.errors import UsageError

_PACKAGES = ("torch", "megatron-core", "deepspeed", "mosaicml-streaming", "numpy", "tokenizers", "transformers")


def choose(config: Config, stem: str, resume: str | None) -> tuple[Path, Path | None, list[str]]:
    """(run folder, checkpoint to go on from, sentences about checkpoints passed over).

    ``resume`` is None (a new run), "auto" (this name's newest whole checkpoint, or a new run when there is none), or a
    run folder or checkpoint. Raises :class:`UsageError` when a new run would overwrite one, or nothing is found.
    """
    runs = Path(config.run.folder)
    if resume not in (None, "auto"):
        return _explicit(Path(resume), config)
    named = config.run.name
    if resume == "auto":
        folder = runs / named if named else next(iter(sorted(runs.glob(f"{stem}-[0-9]*"), reverse=True)), None)
        if folder is not None and (folder / "checkpoints").is_dir():
            checkpoint, passed_over = store.newest_whole(folder / "checkpoints", config.checkpoint.on_damage)
            return folder, checkpoint, passed_over
        if folder is not None and folder.is_dir():  # killed before its first checkpoint
            return folder, None, []
    folder = runs / (named or f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    if resume is None and (folder / "config.yaml").exists():
        raise UsageError(f"{folder} already holds a run; go on with --resume auto, or give another run.name")
    return folder, None, []


def _explicit(path: Path, config: Config) -> tuple[Path, Path | None, list[str]]:
    if (path / commit.MANIFEST).is_file() and path.parent.name == "checkpoints":
        commit.verify(path)
        return path.parent.parent, path, []
    if (path / "checkpoints").is_dir():
        checkpoint, passed_over = store.newest_whole(path / "checkpoints", config.checkpoint.on_damage)
        if checkpoint is not None:
            return path, checkpoint, passed_over
        raise UsageError(f"--resume {path}: the run has no whole checkpoint" + "".join(f"; {s}" for s in passed_over))
    raise UsageError(f"--resume {path} is neither a run folder nor a checkpoint (runs/NAME or runs/NAME/checkpoints/step-N)")


def set_aside_later(checkpoints: Path, step: int) -> list[Path]:
    """Renames checkpoints beyond ``step``: the run that goes on from there has another future than theirs."""
    aside = []
    for path in commit.committed(checkpoints):
        if int(path.name.removeprefix("step-")) > step:
            target = path.with_name(f"{path.name}.superseded")
            shutil.rmtree(target, ignore_errors=True)
            aside.append(path.rename(target))
    return aside


def describe(folder: Path, config: Config, origins: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Writes config, manifest and a snapshot of the code that runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config_text(config))
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
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    package = Path(loopscale.__file__).parent
    shutil.rmtree(folder / "code", ignore_errors=True)
    shutil.copytree(package, folder / "code" / "loopscale", ignore=shutil.ignore_patterns("__pycache__"))


def config_text(config: Config) -> str:
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
