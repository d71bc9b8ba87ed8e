"""What a launched run leaves behind beside what it trains: RUN/launch.

events.jsonl         submitted, started, interrupted, requeued, refused, failed, finished, cancelled: a line each
spec.json  config.yaml  cluster.yaml   how it was launched, for launching it again
token                what nodes that see the folder can read
preflight.json       what its nodes could do at the last start
ends/JOB.N.RANK      why a rank of the N-th start ended before training
requeue-JOB-N        the N-th start asks to be queued again; began-, ended-: it was there; it is over, and has said why
logs/                submitit's: the batch script, and what every rank printed
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loopscale.durable import write_json
from loopscale.errors import UsageError
from loopscale.train.journal import last_saved, read_lines

FOLDER = "launch"


@dataclass(frozen=True)
class Attempt:
    """One start of a job. ``job`` as users name it (12, or 12_3 in an array), ``raw`` as SLURM numbers it."""

    job: str
    raw: str
    restart: int

    @classmethod
    def from_slurm(cls) -> Attempt:
        raw = os.environ["SLURM_JOB_ID"]
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else raw
        return cls(job, raw, int(os.environ.get("SLURM_RESTART_COUNT", "0")))

    def note(self, launched: Path, what: str) -> None:
        """Leaves for the batch script that the start ``began``; that it ``ended`` for a reason that is told; or asks it for
        ``requeue``."""
        path = launched / FOLDER / f"{what}-{self.raw}-{self.restart}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def end(self, run: Path, rank: int) -> Path:
        return run / FOLDER / "ends" / f"{self.raw}.{self.restart}.{rank}"


class Ledger:
    """The events of the run in ``folder``; each is one write, so that a reader sees whole lines."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / FOLDER / "events.jsonl"

    def write(self, event: str, job: str, message: str = "", **facts: Any) -> None:
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, "job": job, "message": message, **facts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())
            os.fsync(file.fileno())

    def events(self) -> list[dict[str, Any]]:
        """What can be read of them."""
        return [event for event in read_lines(self.path) if {"time", "event", "job", "message"} <= set(event)]

    def starts_without_progress(self) -> int:
        """Starts, this one included, since a checkpoint was last added, or somebody started the run."""
        saved, count = last_saved(self.folder), 0
        for event in reversed(self.events()):
            if event["event"] in ("submitted", "requeued") or event.get("saved", saved) != saved:
                break
            count += event["event"] == "started"
        return count

    def silent_starts(self) -> int:
        """Starts before this one that came to no new checkpoint, and ended without a word."""
        told = [event for event in self.events() if event["event"] != "excluded"]
        before = list(reversed(told))[1:]
        return sum(1 for _ in itertools.takewhile(lambda e: e["event"] == "started" and e["saved"] == told[-1]["saved"], before))


def read_spec(folder: Path) -> dict[str, Any]:
    """How the run in ``folder`` was launched. Raises :class:`UsageError` where that cannot be read."""
    path = folder / FOLDER / "spec.json"
    try:
        spec: dict[str, Any] = json.loads(path.read_text())
        spec["task"]["launched"], spec["name"], spec["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); launch the run anew under another name") from None
    return spec


def write_spec(folder: Path, spec: dict[str, Any]) -> None:
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(folder / FOLDER / "spec.json", spec)
