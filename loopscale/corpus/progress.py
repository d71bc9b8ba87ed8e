"""Progress of a long command: a live bar on a terminal, plain lines when piped."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """What a long command tells about itself."""

    def update(self, phase: str, done: int, total: int | None) -> None:
        """Bytes done of a phase; ``total`` None when it cannot be known."""

    def note(self, line: str) -> None:
        """One line to be read: a phase's result, a warning."""

    def close(self) -> None:
        """Ends a live bar."""


def progress_to(stream: TextIO | None = None) -> Progress:
    """A bar when ``stream`` (standard error, unless given) is a terminal, else lines."""
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines(stream)


class Silent:
    """Says nothing."""

    def update(self, phase: str, done: int, total: int | None) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One line at the beginning and end of a phase, and every ``interval`` seconds between."""

    def __init__(self, stream: TextIO, interval: float = 10.0):
        self._stream, self._interval = stream, interval
        self._phase, self._begun, self._said = "", 0.0, 0.0

    def update(self, phase: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._begun, self._said = phase, now, now
        elif now - self._said < self._interval and done != total:
            return
        self._said = now
        rate = done / max(now - self._begun, 1e-9)
        share = f" of {total / 1e6:,.1f} MB ({done / total:.0%})" if total else " MB"
        left = f", {(total - done) / rate:.0f} s left" if total and done and done < total else ""
        self.note(f"{phase}: {done / 1e6:,.1f}{share}" + (f", {rate / 1e6:,.1f} MB/s{left}" if done else ""))

    def note(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None: ...


class Bar:
    """A live bar with rate and time left."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        name = TextColumn("{task.description:<12}")
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=Console(file=stream))
        self._tasks: dict[str, Any] = {}
        self._bar.start()

    def update(self, phase: str, done: int, total: int | None) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total)
        self._bar.update(self._tasks[phase], completed=done, total=total)

    def note(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()
