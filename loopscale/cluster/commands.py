"""`loopscale launch logs`, `cancel` and `requeue`: on runs that have been launched."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from loopscale.cluster.ledger import Ledger
from loopscale.cluster.status import LIVE, job_states, log_files, state_of
from loopscale.errors import ClusterError, UsageError

POLL = 0.5
"""Seconds between looks for new lines."""
STATE_EVERY = 10.0
"""Seconds between questions to SLURM while logs are followed."""


def live_jobs(folder: Path) -> dict[str, str]:
    """The run's jobs that SLURM will run or runs, in order, and what it calls their state."""
    return {job: state for job, (state, _) in sorted(job_states(Ledger(folder).events()).items()) if state in LIVE}


def cancel(folders: Sequence[Path]) -> str:
    """Cancels the runs' jobs, for good; what they trained stays. Raises :class:`UsageError` where there is none."""
    live = {folder: found for folder in folders if (found := live_jobs(folder))}
    jobs = [job for found in live.values() for job in found]
    if not jobs:
        raise UsageError(f"{' '.join(map(str, folders))} has no job that waits or runs")
    for folder, found in live.items():  # first: a job may end at once
        Ledger(folder).write("cancelled", list(found)[-1], "cancelled by `loopscale launch cancel`")
    if (refusal := _try("scancel", *jobs)) is not None:
        raise ClusterError(f"scancel {' '.join(jobs)} failed: {refusal}")
    return f"cancelled {', '.join(jobs)}"


def requeue(folder: Path, overrides: Sequence[str] = ()) -> str:
    """Starts the run's job again, which goes on from the newest whole checkpoint: the job that it has or had; a new one where
    SLURM has forgotten that, or where other settings of the cluster file are asked for. Raises :class:`UsageError` where the
    run has finished, or is to be changed while its job is there."""
    ledger = Ledger(folder)
    events = ledger.events()
    live = live_jobs(folder)
    job = next(iter(live), events[-1]["job"] if events else None)
    if not live and state_of(events, {})[0] == "COMPLETED":
        raise UsageError(f"{folder} has finished; give another run.name for a new run")
    if live and overrides:
        raise UsageError(f"job {job} is there, and SLURM changes no job: `loopscale launch cancel {folder}` first")
    if job in live and live[job] == "PENDING":
        return f"job {job} waits already"
    # of an array, a job that has ended keeps its place, and the array's limit
    if job is not None and not overrides and _try("scontrol", "requeue", job) is None:
        ledger.write("requeued", job, "requeued by `loopscale launch requeue`")
        return f"requeued job {job}"

    from loopscale.cluster.submit import again

    return f"submitted job {again(folder, overrides)}"


def show_logs(folder: Path, follow: bool, out: BinaryIO | None = None) -> None:
    """Prints what the run's ranks printed, each line behind its rank where there are several; with ``follow`` goes on until no
    job of the run is left."""
    out = out or sys.stdout.buffer
    read: dict[Path, int] = {}
    asked, alive = 0.0, follow
    while True:
        files = log_files(folder)
        several = len({_rank(path) for path in files}) > 1
        for path in files:
            read[path] = _copy_lines(path, read.get(path, 0), f"[{_rank(path)}] " if several else "", out.write, whole=alive)
        out.flush()
        if not alive:
            return
        if time.monotonic() - asked > STATE_EVERY:
            alive, asked = bool(live_jobs(folder)), time.monotonic()
        time.sleep(POLL)


def _rank(log: Path) -> str:
    return log.name.rsplit("_", 2)[1]


def _copy_lines(path: Path, start: int, prefix: str, write: Callable[[bytes], object], whole: bool) -> int:
    """Copies what is new; returns where the next part begins. A line that is being written waits while ``whole``."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    if whole:
        text = text[: text.rfind(b"\n") + 1]
    for line in text.splitlines(keepends=True):
        write(prefix.encode() + line)
    return start + len(text)


def _try(*command: str) -> str | None:
    """Runs one of SLURM's commands; returns what it says against it."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() or f"ended with {done.returncode}" if done.returncode else None
