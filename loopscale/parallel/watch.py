"""What every rank is doing, so that when one falls silent the others can say which, and in the midst of what.

A thread of each rank writes what it does to the ranks' common store every second. When a wait fails, the store tells who
has stopped writing; the first rank to find out leaves its sentence there, and the others, who look for it as often as they
write, repeat it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch.distributed as dist

BEAT = 1.0
"""Seconds between two reports."""
LISTENING = 3 * BEAT
"""Time without a new report after which a rank counts as silent."""
ASKING = 5.0
"""Seconds that the store has to answer when contact is lost: it may be behind the same cut cable."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Report:
    number: int
    time: float
    role: str
    doing: str


class Watch:
    """Reports of this rank, and what they say of the others.

    ``rank`` of ``world``; ``store`` is seen by all; ``role`` says where in the model the rank stands. What a rank is
    ``doing``, and whose message it is ``waiting_for`` if it waits for one, is set by whoever does it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, role: str):
        self.doing = "starting"
        self.waiting_for: int | None = None
        self._rank, self._world, self._role = rank, world, f"{role}, {socket.gethostname()}"
        self._stop, self._heard = threading.Event(), ""
        self._store: dist.Store | None = None
        if world > 1:
            self._store = dist.PrefixStore("watch", store.clone())  # a connection of its own
            threading.Thread(target=self._report, daemon=True).start()

    def close(self) -> None:
        """Ends the reports."""
        self._stop.set()

    def last_words(self, sentence: str) -> str:
        """Leaves ``sentence`` as why the run ends, unless a rank has left one; returns the one that stands.

        On rank 0, whose process may hold the store, it returns when all who can have heard it.
        """
        said = self._ask(lambda store: store.compare_set("fault", "", sentence))
        if said is not None and self._rank == 0:
            time.sleep(2 * BEAT)
        return self._heard or (sentence if said is None else said.decode())

    def explain(self, error: BaseException, timeout: float) -> str:
        """One sentence on who is lost, for the rank whose wait failed with ``error``. Takes a few seconds."""
        before = self._ask(self._read) or {}
        time.sleep(LISTENING)
        reports = self._ask(self._read) or {}
        silent = [rank for rank in reports if rank != self._rank and rank in before and before[rank] == reports[rank]]
        lost = self.waiting_for if self.waiting_for in silent or not silent else min(silent, key=lambda r: reports[r].time)
        noticed = f"rank {self._rank} ({self._role}) noticed while {self.doing}"
        if lost is None:
            return self.last_words(f"contact to another rank is lost ({_first_line(error)}); {noticed}")
        who = f"rank {lost} is gone, or has not answered for {timeout:g} s"
        if lost in reports:
            report = reports[lost]
            who = (
                f"rank {lost} ({report.role}) is gone, or has not answered for {timeout:g} s; "
                f"last heard {time.time() - report.time:.0f} s ago, {report.doing}"
            )
        return self.last_words(f"{who}; {noticed}")

    def _report(self) -> None:
        for number in itertools.count():
            report = _Report(number, time.time(), self._role, self.doing)
            try:
                assert self._store is not None
                self._store.set(f"{self._rank}", json.dumps(asdict(report)))
                if not self._heard and self._store.check(["fault"]):
                    self._heard = self._store.get("fault").decode()
            except (RuntimeError, dist.DistError):  # the store is gone, and with it whoever might ask
                return
            if self._stop.wait(BEAT):
                return

    def _read(self, store: dist.Store) -> dict[int, _Report]:
        return {r: _Report(**json.loads(store.get(f"{r}"))) for r in range(self._world) if store.check([f"{r}"])}

    def _ask(self, question: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None if it does not come in time."""
        answers: list[Answer] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, dist.DistError):
                if self._store is not None:
                    answers.append(question(self._store))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ASKING)
        return answers[0] if answers else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
