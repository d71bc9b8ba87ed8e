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

from loopscale.errors import LoopscaleError

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
            threading.Thread(target=self._report, args=(self._store,), daemon=True).start()

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

    def stopped(self, error: BaseException) -> None:
        """Leaves this rank's own ``error`` as why the run ends."""
        reason = str(error) if isinstance(error, LoopscaleError) else f"{type(error).__name__}: {_first_line(error)}"
        self.last_words(f"rank {self._rank} stopped: {reason}")

    def explain(self, error: BaseException, timeout: float) -> str:
        """One sentence on who is lost, for the rank whose wait failed with ``error``. Takes a few seconds."""
        if self._heard:
            return self._heard
        noticed = f"rank {self._rank} ({self._role}) noticed while {self.doing}"
        before = self._ask(self._read)
        if before is None:
            noticed = f"the ranks' store, on the host of rank 0, does not answer either; {noticed}"
        else:
            time.sleep(LISTENING)
        reports = self._ask(self._read) or {}
        silent = [rank for rank in reports if rank != self._rank and before and before.get(rank) == reports[rank]]
        lost = self.waiting_for if self.waiting_for in silent or not silent else min(silent, key=lambda r: reports[r].time)
        if lost is None and before is None and self._rank:
            lost = 0
        if lost is None:
            return self.last_words(f"contact to another rank is lost ({_first_line(error)}); {noticed}")
        where = " (stage 0)" if lost == 0 else ""  # rank 0 is of the home stage at every layout
        who = f"rank {lost}{where} is gone, or has not answered for {timeout:g} s"
        if lost in reports:
            report = reports[lost]
            who = (
                f"rank {lost} ({report.role}) is gone, or has not answered for {timeout:g} s; "
                f"when last heard, {time.time() - report.time:.0f} s ago, it was {report.doing}"
            )
        return self.last_words(f"{who}; {noticed}")

    def _report(self, store: dist.Store) -> None:
        for number in itertools.count():
            report = _Report(number, time.time(), self._role, self.doing)
            try:
                store.set(f"{self._rank}", json.dumps(asdict(report)))
                if not self._heard and store.check(["fault"]):
                    self._heard = store.get("fault").decode()
            except (RuntimeError, dist.DistError):  # the store is gone, and with it whoever might ask
                self._store = None
                return
            if self._stop.wait(BEAT):
                return

    def _read(self, store: dist.Store) -> dict[int, _Report]:
        """All reports, in few requests: every rank may ask at once."""
        ranks = list(range(self._world))
        if not store.check([f"{r}" for r in ranks]):
            ranks = [r for r in ranks if store.check([f"{r}"])]
        return {r: _Report(**json.loads(text)) for r, text in zip(ranks, store.multi_get([f"{r}" for r in ranks]), strict=True)}

    def _ask(self, question: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None if it does not come in time, and ever after."""
        store, answers = self._store, list[Answer]()
        if store is None:
            return None

        def ask() -> None:
            with contextlib.suppress(RuntimeError, dist.DistError):
                answers.append(question(store))

        thread = threading.Thread(target=ask, daemon=True)
        try:
            thread.start()
            thread.join(ASKING)
        except RuntimeError:  # no memory for a thread: this may be why the run ends, and the others must hear it
            ask()
        if not answers:
            self._store = None
            return None
        return answers[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
