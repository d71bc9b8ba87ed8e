"""`loopscale train --study`: the runs of a study as processes of this machine, as many at once as it has room for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from loopscale.cluster.local import Asked
from loopscale.config import Config, load
from loopscale.config.study import Study, StudyRun
from loopscale.durable import locked
from loopscale.errors import LoopscaleError, UsageError
from loopscale.train.journal import last_record, read_lines
from loopscale.train.signals import INTERRUPTED

POLL = 0.2
"""Seconds between looks at what runs."""


@dataclass(frozen=True)
class Room:
    """What this machine gives: runs at once, CPU threads of each rank, and where it has GPUs those of each run."""

    at_once: int
    threads: int
    devices: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def here(cls, study: Study, at_once: int | None) -> Room:
        """What this machine has; see :meth:`of`."""
        import torch

        return cls.of(study, len(os.sched_getaffinity(0)), torch.cuda.device_count(), at_once)

    @classmethod
    def of(cls, study: Study, cores: int, gpus: int, at_once: int | None = None) -> Room:
        """A run takes a GPU for each of its ranks; where there is none, a core for each of their threads. With ``at_once`` so
        many runs share the cores. Raises :class:`UsageError` where a run needs more GPUs than there are."""
        ranks = max(ranks_of(run.loaded.config) for run in study.runs)
        if gpus:
            if ranks > gpus:
                raise UsageError(f"a run of {study.name} has {ranks} ranks, and this machine {gpus} GPU{'s' * (gpus > 1)}")
            fit = min(gpus // ranks, at_once or gpus)
            slots = tuple(tuple(range(n * ranks, (n + 1) * ranks)) for n in range(fit))
            return cls(fit, max(cores // (fit * ranks), 1), slots)
        threads = max(run.loaded.config.train.threads or 1 for run in study.runs)
        fit = at_once or max(cores // (ranks * threads), 1)
        return cls(fit, max(cores // (fit * ranks), 1))


@dataclass
class Running:
    """A run with its process."""

    run: StudyRun
    process: subprocess.Popen[bytes]
    log: Path
    slot: int
    began: float = field(default_factory=time.monotonic)


def ranks_of(config: Config) -> int:
    """Ranks of one replica, which is what a run of a study gets here."""
    return config.parallel.tensor * config.parallel.pipeline


def folder_of(study: Study, run: StudyRun) -> Path:
    return study.folder / run.name


def is_finished(study: Study, run: StudyRun) -> bool:
    """Whether the run has come to the end that its configuration now has."""
    events = read_lines(folder_of(study, run) / "journal.jsonl")
    return any(event.get("kind") == "done" and event.get("step") == run.loaded.config.train.steps for event in events)


def check_same(study: Study) -> None:
    """Raises :class:`UsageError` where a run's folder holds a run of another configuration: arms that were trained
    differently would be compared."""
    for run in study.runs:
        path = folder_of(study, run) / "config.yaml"
        if not path.exists():
            continue
        try:
            trained = load(Config, path).config
        except LoopscaleError as error:
            raise UsageError(
                f"{path} cannot be read ({str(error).splitlines()[-1].strip()}): put the one of a checkpoint beside it in its "
                f"place, or remove that folder to train the run again"
            ) from None
        if told := run.differences(trained.model_dump(mode="json")):
            raise UsageError(
                f"{path.parent} was trained with {'; '.join(told[:4])}: remove that folder to train it again, or give the study "
                f"another place with run.folder=…"
            )


def describe(study: Study, room: Room) -> str:
    """The runs and how they stand; what `--dry-run` prints."""
    rows, missing = [], 0
    for run in study.runs:
        step, finished = _step(folder_of(study, run)), is_finished(study, run)
        state = "finished" if finished else f"at step {step:,}" if step else "to run"
        rows.append(f"  {run.name:<32} {state} of {run.loaded.config.train.steps:,}")
        missing += not finished
    return "\n".join([f"{study.name}: {missing} of {len(study.runs)} runs to train, {room.at_once} at once", *rows])


def run_study(study: Study, room: Room, asked: Asked) -> int:
    """Trains what is missing; a run that fails is told, and the others go on. When ``asked`` to stop all save, and the same
    command goes on later. Returns 0 when all runs are finished, 1 when one failed, 75 when they were stopped."""
    check_same(study)
    shown = _Shown(study)
    waiting = [run for run in study.runs if not is_finished(study, run)]
    running, failed, stopped = list[Running](), list[str](), False
    shown.say(f"{study.name}: {len(waiting)} of {len(study.runs)} runs to train, {room.at_once} at once, in {study.folder}")
    with shown.progress:
        while running or (waiting and not asked.to_stop):
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                asked.ranks.remove(one.process)
                code = one.process.returncode
                if code and (_is_taken(study, one.run) or is_finished(study, one.run)):
                    waiting.append(one.run)
                    shown.ended(one, "left", ": another process trains it")
                elif code in (0, INTERRUPTED):
                    stopped = stopped or code == INTERRUPTED
                    shown.ended(one, "stopped" if code else "finished")
                else:
                    failed.append(one.run.name)
                    shown.ended(one, "failed", f": {_last_line(one.log) or f'exit code {code}'} (log: {one.log})")
            if not asked.to_stop and len(running) < room.at_once:
                waiting = [run for run in waiting if not is_finished(study, run)]
                taken = [run for run in waiting if _is_taken(study, run)]
                if free := next((run for run in waiting if run not in taken), None):
                    waiting.remove(free)
                    slot = min(set(range(room.at_once)) - {one.slot for one in running})
                    running.append(_start(study, free, room, slot))
                    asked.ranks.append(running[-1].process)
                    shown.started(free)
            shown.look()
            time.sleep(POLL)
    if failed:
        shown.say(f"{len(failed)} of {len(study.runs)} runs failed: {', '.join(failed)}; the same command tries them again")
        return 1
    if asked.to_stop or stopped:
        shown.say("stopped; the same command goes on")
        return INTERRUPTED
    return 0


def _start(study: Study, run: StudyRun, room: Room, slot: int) -> Running:
    ranks = ranks_of(run.loaded.config)
    threads = [] if run.loaded.config.train.threads else [f"train.threads={room.threads}"]
    own = [str(run.base), *run.overrides, *threads, "--resume", "auto"]
    command = ["train", *own] if ranks == 1 else ["launch", "local", *own, "--nproc", str(ranks)]
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, room.devices[slot]))} if room.devices else {}
    log = study.folder / "logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "loopscale", *command], stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **devices}, start_new_session=True,  # the terminal's Ctrl-C comes by us
        )  # fmt: skip
    return Running(run, process, log, slot)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _is_taken(study: Study, run: StudyRun) -> bool:
    """Whether another process trains the run: one of another study's command, or one that outlived its command."""
    lock = folder_of(study, run) / ".lock"
    if not lock.exists():
        return False
    with locked(lock, wait=False) as free:
        return not free


class _Shown:
    """On a terminal a bar for the study and one for each run that runs; lines for what begins and ends."""

    def __init__(self, study: Study):
        self.study, self.console = study, Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.all = sum(run.loaded.config.train.steps for run in study.runs)
        self.began, self.first = time.monotonic(), self._done()
        self.total = self.progress.add_task(study.name, total=self.all, completed=self.first)
        self.bars = dict[str, TaskID]()

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def started(self, run: StudyRun) -> None:
        self.bars[run.name] = self.progress.add_task(f"  {run.name}", total=run.loaded.config.train.steps)
        self.say(f"started  {run.name}")

    def ended(self, one: Running, how: str, detail: str = "") -> None:
        self.progress.remove_task(self.bars.pop(one.run.name))
        done = self._done()
        left, made, elapsed = self.all - done, done - self.first, time.monotonic() - self.began
        more = f" · about {_duration(left * elapsed / made)} left" if left and made > 0 else ""
        self.say(f"{how:<8} {one.run.name} after {_duration(time.monotonic() - one.began)}{detail}{more}")

    def look(self) -> None:
        """Moves the bars."""
        if not self.progress.disable:
            self.progress.update(self.total, completed=self._done())
            for name, bar in self.bars.items():
                self.progress.update(bar, completed=_step(self.study.folder / name))

    def _done(self) -> int:
        """Steps of all runs."""
        return sum(_step(folder_of(self.study, run)) for run in self.study.runs)


def _step(run: Path) -> int:
    step: int = last_record(run).get("step", 0)
    return step


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
