"""Rank processes that outlive a test: functions run on them without a start.

The pool, :class:`Ranks`, lives in pytest; a worker is forked from the server of :mod:`tests.launch`. Jobs and answers go
through pipes. Each job has two halves, and no worker begins the second before all have ended the first:
call the function, take the groups down. So no rank closes a connection from which a slower one still reads.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from loopscale.config.tree import ParallelConfig
from tests.launch import Launched, kill_group, rank_environment

PATIENCE = 2.0
"""Seconds that the other ranks have, once one has failed, to end on their own: they may fail alike, each with its reason."""
GRACE = 10.0
"""Seconds that they then have to notice that the failed one is gone."""

RAISED, DIED, LOST, LATE = "raised", "died", "lost contact with the others", "did not end"
FATES = (RAISED, DIED, LOST, LATE)
"""What can become of a rank that fails, causes before consequences."""


@dataclass(frozen=True)
class Failure:
    rank: int
    fate: str
    report: str
    time: float


class RankError(Exception):
    """A job failed; the message has what became of each rank that failed, the first cause first."""

    def __init__(self, failures: Sequence[Failure]):
        self.failures = sorted(failures, key=lambda f: (FATES.index(f.fate), f.time))
        super().__init__("\n\n".join(f"rank {f.rank} {f.fate}:\n{f.report.rstrip()}" for f in self.failures))


class Ranks:
    """The pool. A worker starts with the first job that needs it, and anew after a job that failed with it."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        /,
        *args: Any,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  # it is frozen
        timeout: float = 120,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``function(mesh, *args, **kwargs)`` on each of ``size`` ranks, on the CPU; returns what each returned.

        ``function`` is found by its name in a module of tests, and must leave no patch behind in its process; seeds,
        threads and environment are the same at the start of every job. ``timeout``: seconds, the start of workers
        aside. Raises :class:`RankError`.
        """
        from torch.distributed import TCPStore

        task = pickle.dumps((function, args, kwargs, parallel))
        workers = self._started(size)
        # As under torchrun, the ranks' store outlives each of them; and its port is free, for the server has it already.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for worker in workers:
                place = rank_environment(worker.rank, size, "127.0.0.1", store.port)
                worker.send(({**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}, task))
            results = answers(workers, timeout)
            for worker in workers:
                worker.send("end")
            answers(workers, timeout)
        except BaseException:  # what interrupts the wait too: pytest's own timeout, Ctrl-C
            self._drop(workers)
            raise
        return results

    def close(self) -> None:
        self._drop(list(self._workers.values()))

    def _started(self, size: int) -> list[Worker]:
        self._drop([w for w in self._workers.values() if w.has_died()])
        self._workers |= {rank: Worker(rank) for rank in range(size) if rank not in self._workers}
        return [self._workers[rank] for rank in range(size)]

    def _drop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
            del self._workers[worker.rank]


class Worker:
    """One rank's process, seen from pytest. What it prints goes to a file."""

    def __init__(self, rank: int):
        self.rank = rank
        jobs, self._jobs = Pipe(duplex=False)
        self.answers, replies = Pipe(duplex=False)
        self._log = tempfile.NamedTemporaryFile("rb")  # noqa: SIM115  # open as long as the worker is kept
        self._printed_before = 0
        self._process = Launched(serve, (jobs, replies), Path(self._log.name))
        jobs.close()
        replies.close()

    def send(self, message: Any) -> None:
        self._printed_before = self._log_size()
        with suppress(BrokenPipeError):  # then it has died, which the wait for its answer finds out
            self._jobs.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Its answer, or its :class:`Failure`."""
        try:
            return pickle.loads(self.answers.recv_bytes())
        except (EOFError, ConnectionError):
            self._wait()
            return Failure(self.rank, DIED, f"exit code {self._process.returncode}\n{self.printed()}", time.time())

    def ask_for_stacks(self) -> None:
        """It prints where its threads are, and dies."""
        self._process.send_signal(signal.SIGUSR1)

    def stacks(self) -> Failure:
        self._wait()
        return Failure(self.rank, LATE, self.printed(), time.time())

    def printed(self) -> str:
        """What it has printed since the last message to it."""
        size = self._log_size() - self._printed_before
        return os.pread(self._log.fileno(), size, self._printed_before).decode(errors="replace")

    def has_died(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self._process)

    def close_jobs(self) -> None:
        """As the end of pytest would."""
        self._jobs.close()

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def answers(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Each worker's answer to the last message to it; raises :class:`RankError`."""
    found: dict[int, Any] = {}
    waiting = {w.answers: w for w in workers}
    failed = hear(waiting, found, timeout)
    while failed and waiting:
        for worker in failed:
            worker.kill()  # its connections close, and those who wait for it learn that it is gone
        failed = hear(waiting, found, GRACE)
    for worker in waiting.values():
        worker.ask_for_stacks()
    found |= {w.rank: w.stacks() for w in waiting.values()}
    failures = [a for a in found.values() if isinstance(a, Failure)]
    if failures:
        for worker in workers:
            print(f"---- printed by rank {worker.rank}:\n{worker.printed()}", file=sys.stderr)
        raise RankError(failures)
    return [found[w.rank] for w in workers]


def hear(waiting: dict[Any, Worker], found: dict[int, Any], timeout: float) -> list[Worker]:
    """Moves workers that answer from ``waiting`` to ``found`` while there is time; returns those that failed."""
    failed: list[Worker] = []
    end = time.monotonic() + timeout
    while waiting and (ready := connection.wait(list(waiting), max(0, end - time.monotonic()))):
        for readable in ready:
            worker = waiting.pop(readable)
            found[worker.rank] = worker.receive()
            if isinstance(found[worker.rank], Failure):
                failed.append(worker)
                end = min(end, time.monotonic() + PATIENCE)
    return failed


def serve(jobs: Connection, replies: Connection) -> None:
    """A worker: does jobs until no more can come."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)  # chain: after the stacks the signal kills, as ever
    messages: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=fetch, args=(jobs, messages), daemon=True).start()
    before = dict(os.environ)
    while True:
        job = Job(*pickle.loads(messages.get()))
        replies.send_bytes(job.outcome(job.call))
        messages.get()
        replies.send_bytes(job.outcome(job.end))
        del job
        os.environ.clear()
        os.environ.update(before)
        spare_the_collector()


def fetch(jobs: Connection, messages: SimpleQueue[bytes]) -> None:
    """A thread's work: so a worker that is stuck in a job ends with pytest too."""
    while True:
        try:
            messages.put(jobs.recv_bytes())
        except EOFError:
            os._exit(1)


def spare_the_collector() -> None:
    """Ends what is left of a job, groups and their threads; modules, which stay, need not be searched again (0.3 s)."""
    while gc.collect():  # what goes may have held more from C++, where the collector does not look
        pass
    gc.freeze()


class Job:
    """One rank's part in a job, in its worker."""

    def __init__(self, environment: Mapping[str, str], task: bytes):
        os.environ.update(environment)
        self._rank, self._task = int(environment["RANK"]), task

    def outcome(self, half: Callable[[], Any]) -> bytes:
        """The pickled result of a half, or its failure. ``Connection.send`` would pass tensors as shared memory instead."""
        try:
            return pickle.dumps(half())
        except BaseException as error:
            fate = LOST if is_consequence(error) else RAISED
            return pickle.dumps(Failure(self._rank, fate, traceback.format_exc(), time.time()))

    def call(self) -> Any:
        import numpy
        import torch

        from loopscale.parallel import mesh

        torch.set_num_threads(1)
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        function, args, kwargs, parallel = pickle.loads(self._task)
        self._mesh = mesh.start(parallel)
        return function(self._mesh, *args, **kwargs)

    def end(self) -> None:
        """Leaves torch, Megatron and DeepSpeed as if there had been no job."""
        import megatron.core.utils as utils
        import torch
        from deepspeed.comm import comm
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import layers, mappings

        self._mesh.watch.close()
        parallel_state.destroy_model_parallel()
        if comm.cdb is None:
            torch.distributed.destroy_process_group()
        else:
            comm.destroy_process_group()  # torch's, and what DeepSpeed knows of them
            comm.cdb = None
        for module in (mappings, layers, utils):
            module.torch = torch  # undoes run_on_cpu


def is_consequence(error: BaseException | None) -> bool:
    """Whether ``error`` arose because another rank is gone."""
    from loopscale.parallel.mesh import is_lost_contact

    while error is not None:
        if isinstance(error, RuntimeError) and is_lost_contact(error):
            return True
        error = error.__cause__ or error.__context__
    return False
