"""``train.max_time``: a run stops itself while there is time for its checkpoint, before a scheduler would end it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import psutil

JOB_BEGAN = "LOOPSCALE_JOB_BEGAN"
"""Variable of the environment: when the job that this process is a part of began, in seconds since 1970."""
WRITING = 100e6
"""Bytes per second that a checkpoint is taken to be written at, until one has been."""
LEAVING = 5.0
"""Seconds to close all files and end the process."""


class TimeLimit:
    """Tells before every step whether the run should stop behind it.

    ``seconds`` is the age that the process may reach, None without a limit; ``checkpoint`` the bytes of a checkpoint;
    ``age`` the clock, seconds since the process was started, or its job, if a launcher has said when that was.
    """

    def __init__(self, seconds: float | None, checkpoint: float, age: Callable[[], float] | None = None):
        self._limit, self._age = seconds, age or _age()
        self._first_save, self._longest_save, self._longest_round = checkpoint / WRITING, 0.0, 0.0
        self._round_began: float | None = None

    def reason(self) -> str | None:
        """Why the run should stop behind the step that begins now, or None. Called before every step.

        There must be time for this step, for another one, without which it would be too late to say so, and for a checkpoint
        behind each; all as long as the longest yet. A round is a step with all that lies between it and the next.
        """
        now = self._age()
        if self._round_began is not None:
            self._longest_round = max(self._longest_round, now - self._round_began)
        self._round_began = now
        save = self._longest_save or self._first_save
        if self._limit is None or self._limit - now >= 2 * (self._longest_round + save) + LEAVING:
            return None
        return (
            f"train.max_time {self._limit:g} s, nearly up (a step takes up to {self._longest_round:.1f} s, a save {save:.1f} s)"
        )

    def saw_save(self, seconds: float) -> None:
        """A checkpoint took ``seconds`` from the request to the commit."""
        self._longest_save = max(self._longest_save, seconds)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Time that is no part of a round: saving."""
        before = self._age()
        yield
        if self._round_began is not None:
            self._round_began += self._age() - before


def _age() -> Callable[[], float]:
    began = float(os.environ.get(JOB_BEGAN) or psutil.Process().create_time())
    offset = time.monotonic() - (time.time() - began)  # of a clock that nobody sets
    return lambda: time.monotonic() - offset
