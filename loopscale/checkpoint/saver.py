"""Who saves a run's checkpoints: at once, or in the background from a copy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch.distributed as dist

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Storage, best_first, outlived
from loopscale.checkpoint.store import Snapshot
from loopscale.config.tree import CheckpointConfig
from loopscale.errors import CheckpointError, LoopscaleError
from loopscale.parallel.mesh import on_main

BEST = "validation"
"""The fact of a manifest by which the best checkpoint is chosen: held-out loss, nats per token."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been committed."""

    step: int
    size: int
    """Bytes."""
    seconds: float
    """From the request to the commit."""
    fault: str = ""
    """Why older checkpoints could not be removed, if so."""


class Saver:
    """Saves the checkpoints of a run into ``storage``, one after the other, and removes those that ``config`` does not keep.

    In the background the copies that are saved take as many bytes on each rank as it saves: (4 for the weight + 8 for AdamW's
    moments) × parameters / ranks. ``group`` has all ranks and nobody else uses it meanwhile; its timeout is that of saving.
    """

    def __init__(self, storage: Storage, config: CheckpointConfig, group: dist.ProcessGroup | None):
        self._storage, self._config, self._group = storage, config, group
        self._running: Future[Saved] | None = None

    def save(self, snapshot: Snapshot) -> Saved:
        """Commits a checkpoint; see :func:`store.save`. A collective."""
        return self._save(snapshot, time.monotonic())

    def request(self, snapshot: Snapshot) -> None:
        """Copies everything and lets a thread commit it. The one before must have been waited for. A collective."""
        assert self._running is None
        self._running, began, copied = Future(), time.monotonic(), snapshot.copied()
        # A daemon: when the run fails, its end does not wait for ranks that may be gone.
        threading.Thread(target=self._fulfil, args=(self._running, copied, began), name="saver", daemon=True).start()

    def is_done(self) -> bool:
        """Whether a request has come to its end, which :meth:`wait` then tells."""
        return self._running is not None and self._running.done()

    def wait(self) -> Saved | None:
        """What became of the last request, once; None where there is none. Raises :class:`CheckpointError` if it failed."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        return running.result()

    def _fulfil(self, running: Future[Saved], snapshot: Snapshot, began: float) -> None:
        try:
            running.set_result(self._save(snapshot, began))
        except BaseException as error:  # told to whoever waits
            running.set_exception(error)

    def _save(self, snapshot: Snapshot, began: float) -> Saved:
        manifest = store.save(self._storage, snapshot, group=self._group)
        seconds, fault = time.monotonic() - began, ""
        try:
            on_main(self._prune, self._group)
        except LoopscaleError as error:  # what was saved is saved
            fault = str(error)
        return Saved(snapshot.step, manifest.size, seconds, fault)

    def _prune(self) -> None:
        """Removes what is not kept; a checkpoint whose manifest is damaged counts as one without a score."""
        scores, steps = dict[int, float](), self._storage.steps()
        for step in steps:
            try:
                score = self._storage.manifest(step).facts.get(BEST)
            except CheckpointError:
                continue
            if isinstance(score, (int, float)):
                scores[step] = score
        config = self._config
        for step in outlived(steps, scores, config.keep, config.keep_every, config.keep_best):
            self._storage.remove(step)
        if config.keep_best and scores:
            self._storage.point_at_best(best_first(scores)[0])
