"""A signal asks the run to stop: a flag, looked at between steps. Nothing collective happens in the handler."""

from __future__ import annotations

import signal
from types import FrameType

_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """While entered, the first signal sets :attr:`name`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __enter__(self) -> StopRequest:
        self._before = {s: signal.signal(s, self._handle) for s in _ASKING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.name is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.name = signal.Signals(number).name
