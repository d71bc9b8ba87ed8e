"""Processes that need not import torch, Megatron, DeepSpeed and streaming: they are forked from one that has.

:func:`launch` starts what ``python -m module ...``, ``python script ...`` or ``python -c code ...`` would be, in a tenth of
a second instead of some 13 seconds. It differs in what happens before the first line: variables that libraries read as they
are imported are those of ``SETTINGS``, and the hashes of strings are the same in all processes; and in what happens after
the last: C++ destructors do not run. So some tests start the real thing, with :func:`execute`, and say so.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment of the server and, unless told otherwise, of what it forks."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Launched:
    """A forked process that calls ``target(*args)``, with what tests use of :class:`subprocess.Popen`.

    What it prints, errors too, goes to the file ``output``. It leads a session of its own, so that its process group can
    be killed with its children. ``environment`` is added to that of pytest.
    """

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], output: Path, environment: Mapping[str, str] = NOTHING):
        _ensure_server()
        has_begun, begins = multiprocessing.Pipe(duplex=False)
        own = {**os.environ, **SETTINGS, **environment}
        self._process = multiprocessing.get_context("forkserver").Process(target=_begin, args=(begins, output, own, target, args))
        self._process.start()
        begins.close()
        has_begun.poll(None)  # until the other end is closed: it leads its session, and prints to its file
        has_begun.close()
        self._output, self.pid = output, self._process.pid
        self.returncode: int | None = None
        """As :meth:`poll` or :meth:`wait` has found it."""

    def poll(self) -> int | None:
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises :class:`subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired([str(self._output)], timeout)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has printed until it ended, and None for the errors that are part of it."""
        self.wait(timeout)
        return self._output.read_text(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launch(command: Sequence[str], output: Path, environment: Mapping[str, str] = NOTHING) -> Launched:
    """Starts ``command``, which begins with ``sys.executable``."""
    assert command[0] == sys.executable
    return Launched(_interpret, (list(command[1:]),), output, environment)


def execute(command: Sequence[str], output: Path, environment: Mapping[str, str] = NOTHING) -> subprocess.Popen[bytes]:
    """As :func:`launch`, but the real thing, and any program."""
    with output.open("wb") as file:
        own = {**os.environ, **environment}
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=own, start_new_session=True)


Started = Launched | subprocess.Popen[bytes]


def rank_environment(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """What torchrun would set, with all ranks on one host."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
    return {name: str(value) for name, value in {**place, **meeting}.items()}


def kill_group(process: Started) -> None:
    """Ends it and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ensure_server() -> None:
    """It ends when pytest and all that it has forked have ended."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        forkserver.set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()


def _begin(
    begins: Connection, output: Path, environment: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Makes the forked process like one that has just been started."""
    import numpy
    import torch

    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    numpy.random.seed()  # from the system, as its import does; Python's own is seeded by the fork
    torch.default_generator.seed()
    multiprocessing.set_start_method(None, force=True)  # not that of this process
    begins.close()
    try:
        target(*args)
    finally:
        atexit._run_exitfuncs()


def _interpret(arguments: list[str]) -> None:
    """What ``python`` does with ``arguments``."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
