"""Batches of one data-parallel rank, a pure function of how many global samples were consumed before.

Global sample c (the c-th of the run, counted over epochs) is ``corpus[order[c]]``. A step takes the next
``global_batch`` of them; its depth groups are consecutive slices; rank r takes the r-th contiguous stripe of each
group and cuts it into microbatches. So another number of ranks, microbatch size or number of workers reads the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from loopscale.config import Batch
from loopscale.corpus.order import Order
from loopscale.corpus.packing import PackedCorpus, Sample, starts_of, targets_of
from loopscale.errors import DataError, LoopscaleError

_Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]
"""Tokens, targets, cu_seqlens and samples of a microbatch, as workers send them."""


@dataclass(frozen=True)
class Microbatch:
    """B sequences of S tokens.

    ``tokens`` int64 [B, S+1]; ``targets`` int64 [B, S], -100 where the next token begins another document;
    ``cu_seqlens`` int32, first input of each document (and row) in the flattened [B*S] inputs, then B*S, as variable
    length attention takes it; ``samples`` int64 [B], global sample numbers.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    samples: torch.Tensor

    @property
    def inputs(self) -> torch.Tensor:
        """int64 [B, S]."""
        return self.tokens[:, :-1]

    def to(self, device: torch.device | str) -> Microbatch:
        return Microbatch(*(t.to(device, non_blocking=True) for t in (self.tokens, self.targets, self.cu_seqlens, self.samples)))


@dataclass(frozen=True)
class StepBatch:
    """What a rank reads for one optimizer step: per depth group, its microbatches. Global samples [first, end)."""

    groups: tuple[tuple[Microbatch, ...], ...]
    first: int
    end: int


def batches(
    corpus: PackedCorpus, order: Order, batch: Batch, *, data_rank: int, consumed: int, workers: int, steps: int
) -> Generator[StepBatch, None, None]:
    """The next ``steps`` step batches of data-parallel rank ``data_rank`` after ``consumed`` global samples.

    ``workers`` processes read ahead, or none; what they have read ahead counts nowhere. They ignore the signals that
    ask a run to stop, and end when the iterator is closed. Raises :class:`DataError` for a damaged corpus.
    """
    loader = DataLoader(
        _Reader(corpus, order),
        batch_sampler=_requests(batch, data_rank, consumed, steps),
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # else the loader would draw from the run's own generator
    )
    with _reading(loader) as take:
        for step in range(steps):
            first = consumed + step * batch.global_batch
            groups = tuple(tuple(_tensors(take()) for _ in range(batch.microbatches_per_group)) for _ in range(batch.groups))
            yield StepBatch(groups, first, first + batch.global_batch)


@contextmanager
def _reading(loader: DataLoader[_Arrays]) -> Iterator[Callable[[], _Arrays | LoopscaleError]]:
    """The loader's next item. Its workers end with the block, or at exit if an iterator was never closed: they ignore
    the signal by which multiprocessing would end them, and it would wait for them for ever."""
    others = set(multiprocessing.active_children())
    readers = [iter(loader)]
    workers = set(multiprocessing.active_children()) - others

    def end() -> None:
        readers.clear()  # the last reference: the loader asks its workers to leave, and waits a little
        for worker in workers:
            if worker.is_alive():
                worker.kill()

    atexit.register(end)
    try:
        yield lambda: next(readers[0])
    finally:
        atexit.unregister(end)
        end()


def collate(samples: Sequence[Sample], numbers: Sequence[int]) -> Microbatch:
    """A microbatch of samples of one length under the given sample numbers: for evaluation."""
    length = len(samples[0].targets)
    starts = torch.cat([s.starts + row * length for row, s in enumerate(samples)])
    return Microbatch(
        torch.stack([s.tokens for s in samples]),
        torch.stack([s.targets for s in samples]),
        torch.cat([starts, torch.tensor([len(samples) * length])]).to(torch.int32),
        torch.tensor(numbers),
    )


def _requests(batch: Batch, data_rank: int, consumed: int, steps: int) -> Iterator[list[int]]:
    """Global sample numbers of each of the rank's microbatches."""
    for group in range(steps * batch.groups):
        stripe = consumed + group * batch.group + data_rank * batch.group_per_rank
        for begin in range(stripe, stripe + batch.group_per_rank, batch.microbatch):
            yield list(range(begin, begin + batch.microbatch))


class _Reader(Dataset[_Arrays]):
    """Global sample numbers of a microbatch -> its arrays. Arrays travel through pipes: shared memory would fill
    /dev/shm. An error travels as a value, for the loader would put a traceback into its message."""

    def __init__(self, corpus: PackedCorpus, order: Order):
        self._corpus, self._order = corpus, order

    def __getitems__(self, consumed: list[int]) -> _Arrays | LoopscaleError:
        try:
            windows = [self._corpus.window(self._order[c]) for c in consumed]
        except LoopscaleError as error:
            return error
        length = self._corpus.sequence_length
        starts = [row * length + starts_of(*window) for row, window in enumerate(windows)]
        return (
            np.stack([tokens for tokens, _ in windows]),
            np.stack([targets_of(*window) for window in windows]),
            np.concatenate([*starts, [len(windows) * length]]).astype(np.int32),
            np.array(consumed, np.int64),
        )


def _as_it_is(arrays: Any) -> Any:
    return arrays


def _tensors(arrays: _Arrays | LoopscaleError) -> Microbatch:
    if isinstance(arrays, LoopscaleError):
        raise DataError(str(arrays))
    return Microbatch(*(torch.from_numpy(a) for a in arrays))


def _start_worker(_: int) -> None:
    """A notice to the run reaches its whole process group; the readers are needed until the run has saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
