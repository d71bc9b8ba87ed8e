"""Whom this rank waits for, and how long it has waited: what is left of its time it works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Waits:
    """The waits of one rank, at the places that know that they wait. On a GPU they are its stream's: where the host waits for
    another rank, it only asks the device to."""

    def __init__(self, device: torch.device):
        self.waiting_for: int | None = None
        """The rank whose message is waited for; it stays named where the wait fails."""
        self._device, self._seconds = device, 0.0
        self._spans: list[tuple[Mark, Mark]] = []

    @contextmanager
    def waiting(self, rank: int | None = None) -> Iterator[None]:
        """Time in which this rank waits for ``rank``, or for several."""
        self.waiting_for, began = rank, self._mark()
        yield
        self._spans.append((began, self._mark()))
        self.waiting_for = None

    def seconds(self) -> float:
        """All waits so far. On a GPU it waits until the last of them is over."""
        self._seconds += sum(_between(*span) for span in self._spans)
        self._spans.clear()
        return self._seconds

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: Mark, ended: Mark) -> float:
    """Seconds."""
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
