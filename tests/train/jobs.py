"""The ranks of one run as plain processes, as a launcher without torchrun would start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.conftest import Runs

STARTING = 150.0
"""Seconds within which a job takes its first steps, on a machine that does something else too."""
LOST_RANK = str(Path(__file__).with_name("lost_rank.py"))


def with_lost_rank(command: list[str]) -> list[str]:
    """``command`` with the script that loses a rank in the place of ``-m loopscale``."""
    place = command.index("loopscale")
    return [*command[: place - 1], LOST_RANK, *command[place + 1 :]]


def lost(rank: int, step: int, how: str) -> dict[str, str]:
    """What the script reads from its environment."""
    root = str(Path(__file__).parents[2])
    return {"LOST_RANK": str(rank), "LOST_STEP": str(step), "LOST_HOW": how, "PYTHONPATH": root}


class Job:
    """``commands``: one for each rank. What a rank prints goes to a file; with the block its processes end."""

    def __init__(
        self,
        runs: Runs,
        name: str,
        commands: Sequence[list[str]],
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        port = port or free_port()
        self._runs, self._name = runs, name
        self._printed = [runs.folder / f"{name}-rank-{rank}.txt" for rank in range(len(commands))]
        self.ranks: list[subprocess.Popen[bytes]] = []
        for rank, command in enumerate(commands):
            place = {"RANK": rank, "WORLD_SIZE": len(commands), "MASTER_ADDR": address, "MASTER_PORT": port}
            with self._printed[rank].open("wb") as file:
                own = {**os.environ, **environment, **{key: str(value) for key, value in place.items()}}
                self.ranks.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=own, start_new_session=True)
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait_for_steps(self, steps: int) -> None:
        file = self._runs.path(self._name) / "metrics.jsonl"
        self.wait(lambda: file.exists() and file.read_text().count("\n") >= steps, STARTING)

    def wait(self, happened: Callable[[], bool], seconds: float) -> None:
        """Waits until something has happened."""
        begin = time.monotonic()
        while not happened():
            late = time.monotonic() - begin > seconds
            assert not late, "\n".join(f"---- rank {r}:\n{self.printed(r)}" for r in range(len(self.ranks)))
            time.sleep(0.02)

    def has_ended(self, rank: int) -> bool:
        return self.ranks[rank].poll() is not None

    def is_stopped(self, rank: int) -> bool:
        """Whether SIGSTOP holds it."""
        return Path(f"/proc/{self.ranks[rank].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def printed(self, rank: int) -> str:
        return self._printed[rank].read_text()

    def last_line(self, rank: int) -> str:
        return self.printed(rank).splitlines()[-1]


def free_port() -> int:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        return port.getsockname()[1]
