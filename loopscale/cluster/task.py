"""What each task of a SLURM job does: preflight, training, and whether the job is to be queued again.

submitit unpickles a :class:`Task` and calls it. It is the parent of the process that trains, and imports nothing heavy: it
hears signals from its first second on, and outlives the one that trains. What it decides, the batch script carries out
(:mod:`loopscale.cluster.script`): there is ``scontrol``, also where tasks run in containers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from loopscale.cluster.judge import Verdict
from loopscale.cluster.ledger import Attempt, Ledger
from loopscale.cluster.world import World
from loopscale.config.cluster import ClusterConfig
from loopscale.errors import UsageError
from loopscale.train.journal import last_saved
from loopscale.train.signals import ASKING, INTERRUPTED

MISTAKE = UsageError.exit_code
HUNG = 6
"""Times `preflight.timeout` after which a preflight that has not ended is ended: a device may hang."""
LEAVING = 10.0
"""Seconds between the end of training and that of the job."""


@dataclass(frozen=True)
class Task:
    """One rank of one run. ``launched`` is the folder of what was launched, a run's or a study's; ``run`` that of the run;
    ``train`` the arguments of ``loopscale train``; ``token`` what the run's folder shows to those that see it."""

    launched: str
    run: str
    train: tuple[str, ...]
    cluster: Mapping[str, Any]
    token: str
    max_time: float | None = None
    """The run's own limit, in seconds."""

    def __call__(self) -> None:
        """Never returns but by an exit code where something is to follow, which SLURM shows."""
        child = Child()
        child.listen()
        world, attempt = World.from_slurm(), Attempt.from_slurm()
        code = _Start(self, ClusterConfig(**self.cluster), world, attempt, child).run()
        if code:
            sys.exit(code)


@dataclass
class Child:
    """The process that this task waits for; signals are passed on to it, and remembered when there is none."""

    process: subprocess.Popen[str] | None = None
    asked: str | None = None
    """The signal that this task got."""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=50))
    """What the child said last on its standard error."""

    def listen(self) -> None:
        for number in ASKING:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        if self.process is not None:
            self.process.send_signal(number)

    def run(self, module: list[str], environment: Mapping[str, str], limit: float | None = None) -> tuple[int, str]:
        """Runs ``python -m module …``, passing its standard error through; returns its exit code. With a ``limit`` it has so many
        seconds, and what it prints is returned, too."""
        if self.asked is not None:
            return INTERRUPTED, ""
        self.last.clear()
        command = [sys.executable, "-u", "-m", *module]
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, text=True,
            stdout=subprocess.PIPE if limit else None, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.process = process
        if self.asked is not None:  # while it was being started
            process.terminate()
        assert process.stderr is not None
        listener = threading.Thread(target=self._pass_through, args=(process.stderr,), daemon=True)
        listener.start()
        over = threading.Timer(limit or 0, process.kill)
        if limit:
            over.start()
        printed = process.stdout.read() if process.stdout is not None else ""
        code, self.process = process.wait(), None
        over.cancel()
        listener.join(5)  # processes of its own may have outlived it, and hold the pipe
        return code, printed

    def _pass_through(self, lines: IO[str]) -> None:
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            if line.strip():
                self.last.append(line.rstrip())

    def reason(self, code: int) -> str:
        """Why it ended with ``code``, in a line: the last that it said, with what is indented below it."""
        lines = list(self.last)
        first = next((n for n in reversed(range(len(lines))) if not lines[n].startswith(" ")), len(lines))
        said = "; ".join(" ".join(line.split()) for line in lines[first:])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return said.removeprefix("error: ") or f"its process {how} and said nothing"


class _Start:
    """One start of a task."""

    def __init__(self, task: Task, cluster: ClusterConfig, world: World, attempt: Attempt, child: Child):
        self.task, self.cluster, self.world, self.attempt, self.child = task, cluster, world, attempt, child
        self.run_folder = Path(task.run)
        self.ledger, self.tells = Ledger(self.run_folder), world.rank == 0

    def run(self) -> int:
        """The exit code of the task."""
        self._note("began")
        if self.tells:
            self._tell("started", restart=self.attempt.restart, saved=last_saved(self.run_folder), nodes=self.world.nodes)
            names = ", ".join(signal.Signals(number).name for number in ASKING)
            _say(f"job {self.attempt.job}, start {self.attempt.restart + 1}: {names} save, and queue the job again")
            if (silent := self.ledger.silent_starts()) > self.cluster.retries:
                return self._over("failed", f"{silent} starts have ended without a word; retries is {self.cluster.retries}", 1)
        verdict, problem = self._preflight()
        if self.child.asked is not None:
            return self._interrupted(f"asked to stop by {self.child.asked} before training")
        if verdict is None or verdict.refused is not None:
            reason = verdict.refused if verdict is not None and verdict.refused is not None else f"preflight: {problem}"
            return self._over("refused", reason, 1)
        world = self.world.without(list(verdict.sick), self.cluster.job.nodes)
        if world is None:
            _say(f"{self.world.host} is not needed: {', '.join(verdict.sick.get(self.world.host, ['a spare']))}")
            return 0
        if verdict.sick:  # the first node may be one of them
            self.tells = world.rank == 0
            self._tell("excluded", "; ".join(f"{node}: {', '.join(said)}" for node, said in verdict.sick.items()))
        code, _ = self.child.run(
            ["loopscale", "train", *self.task.train, *self._max_time()], {**world.variables(), **self._network()}
        )
        return self._concluded(code)

    def _preflight(self) -> tuple[Verdict | None, str]:
        """The verdict, or None and why there is none."""
        ends = [str(self.attempt.end(self.run_folder, rank)) for rank in range(self.world.size)]
        asked = {
            "run": self.task.run, "token": self.task.token, "nodes": self.world.nodes, "needed": self.cluster.job.nodes,
            "gpus": self.cluster.job.gpus, "ends": ends, "settings": self.cluster.preflight.model_dump(),
        }  # fmt: skip
        environment = {**self.world.variables(), **self._network()}
        code, printed = self.child.run(
            ["loopscale.cluster.preflight", json.dumps(asked)], environment, HUNG * self.cluster.preflight.timeout
        )
        if code == 0 and printed.strip():
            return Verdict(**json.loads(printed.strip().splitlines()[-1])), ""
        reason = self.child.reason(code)
        end = Path(ends[self.world.rank])
        try:
            end.parent.mkdir(parents=True, exist_ok=True)
            end.write_text(reason)
        except OSError as error:
            _say(f"warning: cannot tell the other ranks: {error}")
        return None, reason

    def _max_time(self) -> list[str]:
        """The job's time, which counts from the job's start (the batch script says when); the same on all ranks."""
        most = 60 * self.cluster.job.time - LEAVING
        return [f"train.max_time={min(most, self.task.max_time or most):.0f}"]

    def _network(self) -> dict[str, str]:
        interface = self.cluster.preflight.interface
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}

    def _concluded(self, code: int) -> int:
        if code == 0:
            return self._over("finished", "", 0)
        reason = self.child.reason(code)
        if code == INTERRUPTED or (self.child.asked is not None and code != MISTAKE):  # also before it could answer
            return self._interrupted(reason)
        if code == MISTAKE:
            return self._over("failed", reason, code)
        shown = code if code > 0 else 128 - code
        if (starts := self.ledger.starts_without_progress()) > self.cluster.retries:
            told = f"{reason} ({starts} starts without a new checkpoint; retries is {self.cluster.retries})"
            return self._over("failed", told, shown)
        self._tell("fault", reason)
        self._note("requeue")  # any rank may ask for it: the first may be on the node that is lost
        return shown

    def _interrupted(self, reason: str) -> int:
        self._tell("interrupted", reason)
        self._note("requeue")
        return INTERRUPTED

    def _over(self, event: str, reason: str, code: int) -> int:
        """The run has ended, for a ``reason`` that another start would meet again."""
        self._tell(event, reason)
        self._note("ended")
        if reason:
            _say(f"error: {reason}")
        return code

    def _note(self, what: str) -> None:
        self.attempt.note(Path(self.task.launched), what)

    def _tell(self, event: str, message: str = "", **facts: Any) -> None:
        if self.tells:
            self.ledger.write(event, self.attempt.job, message, **facts)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
