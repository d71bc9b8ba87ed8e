"""How launched runs stand: what SLURM says of their jobs, what their ledgers say, how far they have come."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.table import Table

from loopscale.cluster.ledger import FOLDER, Ledger, read_spec
from loopscale.errors import ClusterError, UsageError
from loopscale.train.journal import last_record

WAITING = {"PREEMPTED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING", "RESV_DEL_HOLD"}
"""What SLURM calls jobs that will run (again)."""
LIVE = WAITING | {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "SIGNALING"}
"""What it calls jobs that run or will run."""
CONCLUDED = {"finished": "COMPLETED", "failed": "FAILED", "refused": "FAILED", "cancelled": "CANCELLED"}
"""What a ledger's last event says by itself."""
JUST_SUBMITTED = 30.0
"""Seconds in which SLURM may not know a job yet."""


@dataclass(frozen=True)
class Standing:
    """A row of the table."""

    run: str
    state: str
    step: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    left: float | None
    """Seconds to the end of the run, while it runs."""
    restarts: int
    note: str


def launched(runs: Path) -> list[Path]:
    """Folders of launched runs below ``runs``, studies' too, the newest first."""
    found = [path.parents[1] for pattern in ("*", "*/*") for path in runs.glob(f"{pattern}/{FOLDER}/spec.json")]
    return sorted(found, key=lambda folder: (folder / FOLDER / "spec.json").stat().st_mtime, reverse=True)


def find_run(name: str, runs: Path) -> Path:
    """The folder of a launched run, given by its path or by its name below ``runs``. Raises :class:`UsageError`."""
    for folder in (Path(name), runs / name):
        if (folder / FOLDER / "spec.json").exists():
            return folder.absolute()
    known = ", ".join(str(path.relative_to(runs)) for path in launched(runs)[:5]) or "none"
    raise UsageError(f"{name} is no launched run of {runs} (there: {known})")


def find_runs(name: str, runs: Path) -> list[Path]:
    """As :func:`find_run`; of a study all its runs."""
    for folder in (Path(name), runs / name):
        if found := sorted(path.parents[1].absolute() for path in folder.glob(f"*/{FOLDER}/spec.json")):
            return found
    return [find_run(name, runs)]


def standings(folders: Sequence[Path], runs: Path) -> list[Standing]:
    """One row for each run."""
    told = {folder: Ledger(folder).events() for folder in folders}
    slurm = job_states([event for events in told.values() for event in events])
    return [_standing(folder, events, slurm, runs) for folder, events in told.items()]


def _standing(folder: Path, events: Sequence[Mapping[str, Any]], slurm: Mapping[str, tuple[str, str]], runs: Path) -> Standing:
    try:
        steps = read_spec(folder)["steps"]
    except UsageError as error:  # one damaged run hides no other
        return Standing(_name(folder, runs), "UNKNOWN", 0, 0, None, None, None, 0, str(error))
    record = last_record(folder)
    state, note = state_of(events, slurm)
    if state in ("FAILED", "LOST") and not note:
        note = _trace(folder)
    if state in ("FAILED", "LOST", "TIMEOUT", "NODE_FAIL", "CANCELLED"):
        note = f"{note}; `loopscale launch requeue {_name(folder, runs)}` goes on".removeprefix("; ")
    step = record.get("step", 0)
    return Standing(
        run=_name(folder, runs),
        state=state,
        step=step,
        steps=steps,
        loss=record.get("loss"),
        tokens_per_second=record.get("tokens_per_s") if state == "RUNNING" else None,
        left=(steps - step) * record["elapsed"] / step if state == "RUNNING" and step else None,
        restarts=max(sum(event["event"] == "started" for event in events) - 1, 0),
        note=note,
    )


def _name(folder: Path, runs: Path) -> str:
    return str(folder.relative_to(runs.absolute())) if folder.is_relative_to(runs.absolute()) else str(folder)


def state_of(events: Sequence[Mapping[str, Any]], slurm: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """(state, note) of a run: SLURM's word for a job that lives; for one that has ended its own last word, which is more exact
    than SLURM's. A job that will run again is PENDING, whatever it is called; one that SLURM does not know and that has
    not said how it ended is LOST."""
    jobs = [event["job"] for event in events if event["event"] == "submitted"]
    if not jobs:
        return "LOST", "it has never been submitted"
    last = events[-1]
    alive = [slurm[job] for job in jobs if job in slurm and slurm[job][0] in LIVE]
    if alive and last["event"] != "finished":
        state, reason = next((told for told in alive if told[0] == "RUNNING"), alive[0])
        again = last["event"] in ("interrupted", "fault")
        said = f"{last['message']}, queued again" if again else ""
        if state in WAITING or (state in ("RUNNING", "COMPLETING") and again):  # it is on its way out
            return "PENDING", said or f"{state.lower().replace('_', ' ')}, to run again"
        if state == "PENDING":
            return "PENDING", said or reason.removeprefix("None").lower()
        return state, _excluded(events) if state == "RUNNING" else ""
    if (end := _conclusion(events)) is not None:
        return CONCLUDED[end["event"]], end["message"]
    state = slurm[jobs[-1]][0] if jobs[-1] in slurm else ""
    if not state and last["event"] == "submitted" and _age(last) < JUST_SUBMITTED:
        return "PENDING", ""
    silent = "its job has ended without a word" if last["event"] == "started" else last["message"]
    if state in ("", "COMPLETED"):  # it did not say that it had finished
        return "LOST", silent
    return state, silent if state == "FAILED" else last["message"]


def _conclusion(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """How the last start ended, by its ledger; a cancelled run may still say that it was interrupted."""
    for event in reversed(events):
        if event["event"] in CONCLUDED:
            return event
        if event["event"] in ("submitted", "requeued", "started"):
            return None
    return None


def _excluded(events: Sequence[Mapping[str, Any]]) -> str:
    since = [event["event"] for event in events]
    start = len(since) - 1 - since[::-1].index("started") if "started" in since else len(since)
    return next((f"without {event['message']}" for event in events[start:] if event["event"] == "excluded"), "")


def _age(event: Mapping[str, Any]) -> float:
    return time.time() - datetime.fromisoformat(event["time"]).timestamp()


def _trace(folder: Path) -> str:
    """What a job that ended before its first word has left: a line of its batch script, or the end of its log."""
    ends = sorted((folder / FOLDER / "ends").glob("*"), key=lambda path: path.stat().st_mtime)
    if ends:
        return ends[-1].read_text().strip()
    return last_words(folder)


def last_words(folder: Path) -> str:
    """The last line that the run's newest log of errors has."""
    logs = sorted(log_files(folder), key=lambda path: path.stat().st_mtime)
    for log in reversed([log for log in logs if log.suffix == ".err"]):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()
    return ""


def log_files(folder: Path) -> list[Path]:
    """What all tasks of the run's jobs printed."""
    where = Path(read_spec(folder)["task"]["launched"]) / FOLDER / "logs"
    jobs = {event["job"] for event in Ledger(folder).events()}
    return sorted(path for path in where.glob("*_log.*") if path.name.rsplit("_", 2)[0] in jobs)


def job_states(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """(state, reason) of each job in ``events`` that SLURM knows, by squeue, and by sacct where there is accounting: it forgets
    no job.

    Raises :class:`ClusterError` where SLURM does not answer."""
    submitted = {event["job"]: event["by"] for event in events if event["event"] == "submitted"}
    if not (wanted := set(submitted)):
        return {}
    if shutil.which("squeue") is None:
        raise ClusterError("there is no squeue here: this machine belongs to no SLURM cluster")
    users = ",".join(sorted(set(submitted.values())))
    told = _ask(["squeue", f"--user={users}", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"])
    if told is None:
        raise ClusterError("squeue gives no answer; is SLURM's controller up?")
    found = {job: (state, reason) for job, state, reason in _rows(told)}
    if missing := sorted(wanted - set(found)):
        columns = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State,Reason"]
        told = _ask(["sacct", *columns, "--jobs", ",".join(missing)])
        found |= {job: (state.split()[0], reason) for job, state, reason in _rows(told or "") if state}
    return {job: found[job] for job in wanted & set(found)}


def _rows(text: str) -> list[tuple[str, str, str]]:
    rows = [line.strip().split("|") for line in text.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def _ask(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def table(rows: Sequence[Standing]) -> Table:
    """The rows as people read them."""
    shown = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", "loss", "tok/s", "left", "restarts", "note"):
        number = name in ("step", "loss", "tok/s", "left", "restarts")
        shown.add_column(name, justify="right" if number else "left", no_wrap=name != "note")
    for row in rows:
        rate = "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        left = "–" if row.left is None else str(timedelta(seconds=round(row.left)))
        loss = "–" if row.loss is None else f"{row.loss:.3f}"
        shown.add_row(row.run, row.state, f"{row.step:,}/{row.steps:,}", loss, rate, left, str(row.restarts), row.note)
    return shown
