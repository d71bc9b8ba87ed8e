"""`loopscale launch local`: the ranks of a run as processes of one terminal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from loopscale.cluster.world import World
from loopscale.train.signals import ASKING, INTERRUPTED

EXPLAINING = 30.0
"""Seconds beyond `parallel.timeout` in which ranks find out that another is gone, and say so, before they are ended."""


def run_local(count: int, train: Sequence[str], timeout: float) -> int:
    """Runs ``loopscale train TRAIN…`` as ``count`` ranks, each line that they print behind its rank, and returns the exit code
    of the first that failed, or 0. One Ctrl-C asks all of them to stop, a second one ends them."""
    port = _free_port()
    asked = Asked()
    for rank in range(count):
        asked.ranks.append(
            subprocess.Popen(
                [sys.executable, "-u", "-m", "loopscale", "train", *train],
                env={**os.environ, **World(("127.0.0.1",), count, 0, rank, port).variables()},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,  # the terminal's Ctrl-C comes by us
            )
        )  # fmt: skip
    ranks = asked.ranks
    if asked.to_stop:  # while they were being started
        asked.pass_on()
    lock = threading.Lock()
    readers = []
    for rank, process in enumerate(ranks):
        assert process.stdout is not None
        prefix = f"[{rank}] ".encode() if count > 1 else b""
        readers.append(threading.Thread(target=_prefixed, args=(process.stdout, prefix, lock), daemon=True))
        readers[-1].start()
    code = _wait(ranks, timeout + EXPLAINING)
    for reader in readers:
        reader.join(5)
    return INTERRUPTED if asked.to_stop and code == 128 + signal.SIGTERM else code  # before they could answer


class Asked:
    """Hears that the ranks are to stop, and passes it on: as SIGTERM, of which a Python that is just starting dies in silence."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.to_stop = False
        for number in (*ASKING, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.to_stop = True
        self.pass_on()

    def pass_on(self) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.terminate()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], patience: float) -> int:
    """The first exit code that is not 0; ranks that stay ``patience`` seconds after it are killed."""
    first, since = 0, None
    while any(process.poll() is None for process in ranks):
        for process in ranks:
            code = process.poll()
            if code and not first:
                first, since = code if code > 0 else 128 - code, time.monotonic()
        if since is not None and time.monotonic() - since > patience:
            for process in ranks:
                process.kill()
        time.sleep(0.05)
    codes = [process.returncode for process in ranks]
    return first or next((code if code > 0 else 128 - code for code in codes if code), 0)


def _prefixed(lines: IO[bytes], prefix: bytes, lock: threading.Lock) -> None:
    for line in lines:
        with lock:
            sys.stdout.buffer.write(prefix + line)
            sys.stdout.buffer.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
