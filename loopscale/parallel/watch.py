"""What every rank is doing, so that when one falls silent or does not come on the others can say which, in the midst of what.

A thread of each rank writes what it does to the ranks' common store every second. Rank 0's also looks whether a step takes
too long, and then says who waits for whom. When a wait fails, the store tells who has stopped writing; the first rank to find
out leaves its sentence there, and the others, who look for it as often as they write, repeat it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from loopscale.durable import replacing
from loopscale.errors import ClusterError, LoopscaleError
from loopscale.parallel import crash
from loopscale.parallel.reports import BEAT, LISTENING, Alarm, Report, Silence, whereabouts
from loopscale.parallel.waits import Waits

ASKING = 5.0
"""Seconds that the store has to answer when contact is lost: it may be behind the same cut cable."""
SHOWN = 16
"""Ranks that a warning shows on the terminal; its file has them all."""

Answer = TypeVar("Answer")


class Watch:
    """Reports of this rank, and what they say of the others.

    ``rank`` of ``world``; ``store`` is seen by all; ``role`` says where in the model the rank stands; ``waits`` knows whose
    message it waits for. What a rank is ``doing`` is set by whoever does it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, role: str, waits: Waits):
        self.role = f"{role}, {socket.gethostname()}"
        self.doing = "starting"
        self.begin("the start", 0)
        self._rank, self._world, self._waits, self._thread = rank, world, waits, threading.get_ident()
        self._stop, self._ends = threading.Event(), False
        self._heard, self._file = "", ""
        self._folder: Path | None = None
        self._silence, self._silent_for, self._patient, self._beaten = Silence(), math.inf, False, 0.0
        self._end: Callable[[str], None] = lambda sentence: None
        self._alarm: Alarm | None = None
        self._store: dist.Store | None = None
        if world > 1:
            self._store = dist.PrefixStore("watch", store.clone())  # a connection of its own
            threading.Thread(target=self._report, args=(self._store,), daemon=True).start()

    @property
    def doing(self) -> str:
        return self._doing[0]

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what, time.time()

    def begin(self, phase: str, step: int) -> None:
        """Begins what may take too long: step ``step``, or a ``phase`` of the run around it."""
        self._phase, self._step = (phase, time.monotonic()), step

    def attend(self, folder: Path, stuck_after: float, silent_for: float, end: Callable[[str], None]) -> None:
        """From now on ``folder`` takes the run's crash file; and where rank 0 finds that a phase takes longer than
        ``stuck_after`` seconds (0: never), it says who waits for whom, there too.

        ``silent_for`` is how many seconds a rank may be silent when the others wait :meth:`patiently`; ``end`` is told why,
        and ends the process."""
        self._folder, self._silent_for, self._end = folder, silent_for, end
        if self._rank == 0 and stuck_after:
            self._alarm = Alarm(stuck_after)

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Around waits that may take much longer than a rank may be silent: while one works, its reports go on. Where they
        stop, or the store does, the process ends from the reporting thread, for the main one cannot be woken."""
        over = threading.Event()
        self._patient, self._beaten = True, time.monotonic()
        if self._store is not None and self._rank:
            threading.Thread(target=self._guard, args=(over,), daemon=True).start()
        try:
            yield
        finally:
            self._patient = False
            over.set()

    def close(self) -> None:
        """Ends the reports."""
        self._stop.set()

    def stopped(self, error: BaseException) -> None:
        """Leaves this rank's own ``error`` as why the run ends."""
        reason = str(error) if isinstance(error, LoopscaleError) else f"{type(error).__name__}: {_first_line(error)}"
        self._last_words(f"rank {self._rank} stopped: {reason}", error)

    def explain(self, error: BaseException, timeout: float) -> str:
        """One sentence on who is lost, for the rank whose wait failed with ``error``. Takes a few seconds."""
        self._ends = True
        if self._heard:
            return self._with_file(self._heard)
        noticed = f"rank {self._rank} ({self.role}) noticed while {self.doing}"
        before = self._ask(self._read)
        if before is None:
            noticed = f"the ranks' store, on the host of rank 0, does not answer either; {noticed}"
        else:
            time.sleep(LISTENING)
        reports = self._ask(self._read) or {}
        lost = self._lost(before or {}, reports, timeout)
        if lost is None and before is None and self._rank:
            lost = 0
        if lost is None:
            return self._last_words(f"contact to another rank is lost ({_first_line(error)}); {noticed}", error)
        return self._last_words(f"{_is_gone(lost, reports.get(lost), timeout)}; {noticed}", error)

    def _lost(self, before: dict[int, Report], reports: dict[int, Report], timeout: float) -> int | None:
        """Of the silent ranks the one that was waited for, or the first to fall silent; else one that reports still, but has
        long been at one thing and waits for nobody."""
        awaited, others = self._waits.waiting_for, [rank for rank in reports if rank != self._rank]
        silent = [rank for rank in others if before.get(rank) == reports[rank]]
        if silent:
            return awaited if awaited in silent else min(silent, key=lambda r: reports[r].time)
        hanging = [r for r in others if not reports[r].waiting_for and reports[r].held > timeout / 2]
        return max(hanging, key=lambda r: reports[r].held) if hanging else awaited

    def _last_words(self, sentence: str, error: BaseException) -> str:
        """Leaves ``sentence`` as why the run ends, unless a rank has left one; returns the one that stands, with the name of the
        first rank's crash file.

        On rank 0, whose process may hold the store, it returns when all who can have heard it.
        """
        self._ends = True
        said = self._ask(lambda store: store.compare_set("fault", "", sentence))
        if said is None or said.decode() == sentence:
            path = self._leave(sentence, error)
            self._ask(lambda store: store.set("file", path))
            told = sentence + _see(path)
        else:
            told = self._with_file(said.decode())
        if said is not None and self._rank == 0:
            time.sleep(2 * BEAT)
        return told

    def _leave(self, sentence: str, error: BaseException) -> str:
        """Writes the crash file; returns its path, or nothing where there is none. A user's mistake leaves none."""
        folder = self._folder
        if folder is None or (isinstance(error, LoopscaleError) and error.exit_code == 2):
            return ""
        facts = {
            "rank": self._rank, "role": self.role, "time": datetime.now(UTC).isoformat(timespec="seconds"), "step": self._step,
            "doing": self.doing, "sentence": sentence,
        }  # fmt: skip
        return str(_in_time(lambda: crash.write(folder, facts, error)) or "")

    def _with_file(self, sentence: str) -> str:
        """A sentence heard from the first rank, with the name of its crash file, which it writes once it has said it."""

        def path(store: dist.Store) -> str:
            with contextlib.suppress(dist.DistError):
                store.wait(["file"], timedelta(seconds=2 * BEAT))
                return store.get("file").decode()
            return ""

        return sentence + _see(self._file or self._ask(path) or "")

    def _listen(self, store: dist.Store) -> None:
        """Hears why the run ends as soon as a rank has said it: the store may be gone when this rank has to tell."""
        if not self._heard and store.check(["fault"]):
            self._heard = store.get("fault").decode()
        if self._heard and not self._file and store.check(["file"]):
            self._file = store.get("file").decode()

    def _give_up(self, lost: int, report: Report | None) -> None:
        """Ends the process because of a silent rank, unless the main thread does already."""
        if self._patient and not self._ends:
            store = "" if report else "the ranks' store, on the host of rank 0, does not answer either; "
            noticed = f"{store}rank {self._rank} ({self.role}) noticed while {self.doing}"
            sentence = f"{_is_gone(lost, report, self._silent_for)}; {noticed}"
            self._end(self._last_words(sentence, ClusterError(sentence)))

    def _guard(self, over: threading.Event) -> None:
        """The store may be in the process of rank 0, and when that falls silent the reporting thread hangs with it."""
        looked = time.monotonic()
        while not over.wait(BEAT):
            slept, looked = time.monotonic() - looked > LISTENING, time.monotonic()
            if slept:  # this process was the silent one
                self._beaten = looked
            elif looked - self._beaten > self._silent_for:
                self._give_up(0, None)
                return

    def _look_for_silent(self, store: dist.Store) -> None:
        """Two ranks do, for one of them may be the silent one; the others see them end."""
        reports = self._read(store) if self._patient and self._rank < 2 else {}
        if reports and (lost := self._silence.longer_than(self._silent_for, reports, time.monotonic())) is not None:
            self._give_up(lost, reports[lost])

    def _report(self, store: dist.Store) -> None:
        waiting_for: tuple[int, ...] = ()
        for number in itertools.count():
            group, at = whereabouts(self._thread)
            if not self._ends:  # a rank that explains why its wait has failed had waited to the end
                awaited = self._waits.waiting_for
                waiting_for = group if awaited is None else (awaited,)
            doing, since = self._doing
            report = Report(number, time.time(), self.role, doing, since, waiting_for, at)
            try:
                store.set(f"{self._rank}", json.dumps(asdict(report)))
                self._listen(store)
                self._look_for_silent(store)
                text = self._alarm and self._alarm.look(self._phase, time.monotonic(), lambda: self._read(store))
            except (RuntimeError, dist.DistError):  # the store is gone, and with it whoever might ask
                self._store = None
                self._give_up(0, None)
                return
            self._beaten = time.monotonic()
            if text:  # by a thread of its own: a file system that hangs may be what it tells of
                threading.Thread(target=self._warn, args=(text,), daemon=True).start()
            if self._stop.wait(BEAT):
                return

    def _warn(self, text: str) -> None:
        lines = text.splitlines()
        more = [f"  … and {len(lines) - 1 - SHOWN} more ranks in {self._folder}/stuck.txt"] if len(lines) > SHOWN + 1 else []
        print("\n".join(["warning: " + lines[0], *lines[1 : SHOWN + 1], *more]), file=sys.stderr, flush=True)
        if self._folder is not None:
            with contextlib.suppress(OSError), replacing(self._folder / "stuck.txt") as out:
                out.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n".encode())

    def _read(self, store: dist.Store) -> dict[int, Report]:
        """All reports, in few requests: every rank may ask at once."""
        ranks = list(range(self._world))
        if not store.check([f"{r}" for r in ranks]):
            ranks = [r for r in ranks if store.check([f"{r}"])]
        texts = store.multi_get([f"{r}" for r in ranks])
        return {r: Report(**json.loads(text)) for r, text in zip(ranks, texts, strict=True)}

    def _ask(self, question: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None if it does not come in time, and ever after."""
        store = self._store
        if store is None:
            return None

        def ask() -> tuple[Answer] | None:
            with contextlib.suppress(RuntimeError, dist.DistError):
                return (question(store),)
            return None

        answer = _in_time(ask)
        if answer is None:
            self._store = None
            return None
        return answer[0]


def _in_time(action: Callable[[], Answer]) -> Answer | None:
    """What ``action``, which must not raise, gives within a few seconds; else None."""
    answers = list[Answer]()

    def act() -> None:
        answers.append(action())

    thread = threading.Thread(target=act, daemon=True)
    try:
        thread.start()
        thread.join(ASKING)
    except RuntimeError:  # no memory for a thread: this may be why the run ends, and the others must hear it
        act()
    return answers[0] if answers else None


def _is_gone(rank: int, report: Report | None, timeout: float) -> str:
    if report is None:
        where = " (stage 0)" if rank == 0 else ""  # rank 0 is of the home stage at every layout
        return f"rank {rank}{where} is gone, or has not answered for {timeout:g} s"
    return (
        f"rank {rank} ({report.role}) is gone, or has not answered for {timeout:g} s; when last heard, "
        f"{time.time() - report.time:.0f} s ago, it was {report.doing}"
    )


def _see(path: str) -> str:
    return f"; see {path}" if path else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
