"""What a rank tells the others of itself, and what follows from all reports together: who waits for whom."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

BEAT = 1.0
"""Seconds between two reports."""
LISTENING = 3 * BEAT
"""Time without a new report after which a rank counts as silent."""
NAMED = 6
"""Ranks that a line names one by one."""


@dataclass(frozen=True)
class Report:
    """One rank's; times by its own clock."""

    number: int
    time: float
    role: str
    """Where in the model it stands, and its host."""
    doing: str
    since: float
    """When it began that."""
    waiting_for: Sequence[int]
    at: str
    """Where in the code it is: file:line."""

    @property
    def held(self) -> float:
        """Seconds for which it had been doing what it does."""
        return self.time - self.since


def whereabouts(thread: int) -> tuple[tuple[int, ...], str]:
    """The ranks of the group whose collective ``thread`` is in, and its place in the code.

    Collectives are called by torch, Megatron and DeepSpeed too, and inside layers: only the stack knows of all of them.
    """
    frame = sys._current_frames().get(thread)
    place = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    while frame is not None:
        if frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
            with contextlib.suppress(Exception):  # a group that is being made or taken down
                return tuple(dist.get_process_group_ranks(frame.f_locals.get("group"))), place
        frame = frame.f_back
    return (), place


def who_waits(reports: Mapping[int, Report], silent: Collection[int], now: float) -> list[str]:
    """A line for each rank: first those that have fallen silent, then those that wait for nobody, longest first."""

    def order(rank: int) -> tuple[int, float]:
        report = reports[rank]
        return (0, rank) if rank in silent else (2, rank) if report.waiting_for else (1, -report.held)

    return [_line(rank, reports, silent, now) for rank in sorted(reports, key=order)]


def _line(rank: int, reports: Mapping[int, Report], silent: Collection[int], now: float) -> str:
    report = reports[rank]
    who = f"rank {rank} ({report.role})"
    if rank in silent:
        return f"{who} has not reported for {now - report.time:.0f} s; it was {report.doing}"
    who = f"{who} has been {report.doing} for {report.held:.0f} s"
    if not report.waiting_for:
        return f"{who} and waits for nobody, at {report.at}"
    others = [r for r in report.waiting_for if r != rank]
    missing = [r for r in others if r in silent or r not in reports or rank not in reports[r].waiting_for] or others
    return f"{who} and waits for {_named(missing)}"


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED])) + f" and {len(ranks) - NAMED} more" * (len(ranks) > NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


class Silence:
    """Since when which ranks have not reported, as this rank has seen it."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, float]] = {}

    def longer_than(self, seconds: float, reports: Mapping[int, Report], now: float) -> int | None:
        """The rank that is silent for the longest, if that is more than ``seconds``; ``now`` by a clock that never jumps."""
        for rank, report in reports.items():
            if rank not in self._heard or self._heard[rank][0] != report.number:
                self._heard[rank] = report.number, now
        rank, (_, heard) = min(self._heard.items(), key=lambda item: item[1][1])
        return rank if now - heard > seconds else None


class Alarm:
    """Tells that something takes longer than ``after`` seconds, and again whenever the time has doubled."""

    def __init__(self, after: float):
        self._after = self._limit = after
        self._phase: tuple[str, float] | None = None
        self._heard: tuple[float, Mapping[int, Report]] | None = None

    def look(self, phase: tuple[str, float], now: float, read: Callable[[], Mapping[int, Report]]) -> str | None:
        """The text that is due ``now``, if one is, on a ``phase`` (its name, when it began; as ``now`` by a clock that never
        jumps). Reads all reports twice, some time apart: who is silent shows by that."""
        if phase != self._phase:
            self._phase, self._limit, self._heard = phase, self._after, None
        name, began = phase
        if now - began < self._limit:
            return None
        if self._heard is None:
            self._heard = now, read()
        since, before = self._heard
        if now - since < LISTENING:
            return None
        reports = read()
        silent = {r for r, report in reports.items() if r in before and report.number == before[r].number}
        self._limit, self._heard = 2 * (now - began), None
        lines = who_waits(reports, silent, time.time())
        return "\n  ".join([f"{name} has taken {now - began:.0f} s so far; the likely cause first:", *lines])
