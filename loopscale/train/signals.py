"""A signal asks the run to stop: a flag, looked at between steps. Nothing collective happens on its way.

The interpreter's own handler writes a signal's number into a pipe, and a thread reads it there: so it is heard, and the
time that is left is kept, also while the main thread waits inside a library.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from types import FrameType

INTERRUPTED = 75
"""Exit code of a run that was asked to stop, and goes on with --resume auto (EX_TEMPFAIL)."""
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ONE_NOTICE = 3.0
"""Seconds in which further signals are the first one's echo: a launcher passes on what the whole job has got already."""
_OTHERS = 0
"""What is written into the pipe in the place of a signal's number when another rank has got one."""


class StopRequest:
    """From :meth:`listen` to :meth:`close`, signals are requests to stop, and ``grace`` is how many seconds one leaves.
    As a context manager it does both; either is for the main thread.

    Until :meth:`begin` there is nothing to save, and the process ends at once. Then the first signal sets :attr:`name`; a
    second one, or the end of the grace, ends the process at once, whatever it does, with exit code 75. Corpus readers, which
    outlive signals, are ended with it.
    """

    def __init__(self, grace: float):
        self.name: str | None = None
        """The signal that this process got."""
        self._grace, self._begun, self._failed = grace, False, False

    def __enter__(self) -> StopRequest:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self) -> None:
        """Takes over the signals."""
        self._heard, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._before = {number: signal.signal(number, _leave_it_to_the_thread) for number in ASKING}
        self._told_before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Gives them back to whoever had them."""
        signal.set_wakeup_fd(self._told_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._told)  # which ends the thread

    def begin(self) -> None:
        """From here on a signal is answered with a checkpoint."""
        self._begun = True

    def begin_grace(self) -> None:
        """Another rank has got a signal: the grace holds here too."""
        os.write(self._told, bytes([_OTHERS]))

    def fail(self) -> None:
        """The run ends with an error. A launcher that ends all ranks because of one lets this one say why; if it has to
        be ended at once, its exit code is 1."""
        self._failed = True

    def _listen(self) -> None:
        first = None
        waiting = select.poll()
        waiting.register(self._heard, select.POLLIN)
        while True:
            left = None if first is None else max(first + self._grace - time.monotonic(), 0.0)
            if not waiting.poll(None if left is None else 1000 * left):
                asked = self.name or "a signal to another rank"
                _leave(f"has not ended within train.grace {self._grace:g} s of {asked}; {_STANDS}", self._failed)
            told = os.read(self._heard, 64)
            if not told:
                os.close(self._heard)
                return
            for number in told:
                if number not in (*ASKING, _OTHERS):
                    continue
                name = None if number == _OTHERS else signal.Signals(number).name
                if not self._begun and not self._failed:
                    _leave(f"asked to stop by {name} before the first step; start again with --resume auto")
                now = time.monotonic()
                if first is None:
                    first = now
                elif name is not None and now - first > ONE_NOTICE:
                    _leave(f"asked to stop again, by {name}, and ends at once; {_STANDS}", self._failed)
                if name is not None and self.name is None:
                    self.name = name
                    if _rank() == 0 and not self._failed:
                        _say(f"asked to stop by {name}: saves behind this step, within {self._grace:g} s; again: ends at once")


def leave_lost(sentence: str) -> None:
    """Ends the process because of a lost rank, from a thread: the main one waits for it."""
    _leave(f"error: {sentence}; start again with --resume auto", failed=True)


_STANDS = "the last checkpoint stands, go on with --resume auto"


def _leave(sentence: str, failed: bool = False) -> None:
    """Ends the process, whatever its other threads do."""
    with contextlib.suppress(Exception):
        for reader in multiprocessing.active_children():
            reader.kill()
    _say(sentence)
    os._exit(1 if failed else INTERRUPTED)


def _say(sentence: str) -> None:
    """By the file descriptor, for another thread may hold the lock of what lies above it."""
    who = f"rank {_rank()}: " if _rank() else ""
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, f"{who}{sentence}\n".encode())


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave_it_to_the_thread(number: int, _: FrameType | None) -> None:
    """A handler must be there, or the signal would end the process."""
