"""The ranks of one run as plain processes, as a launcher without torchrun would start them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.launch import NOTHING, Started, kill_group, launch, rank_environment

STARTING = 150.0
"""Seconds within which a job takes its first steps, on a machine that does something else too."""
ENDING = 300.0
"""Seconds within which a small run ends."""
LOST_RANK = str(Path(__file__).with_name("lost_rank.py"))
FAULTY_RANK = str(Path(__file__).with_name("faulty_rank.py"))


def under_torchrun(command: Sequence[str], ranks: int) -> list[str]:
    """``command``, which begins with the interpreter, as torchrun starts it."""
    python, *rest = command
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *rest]


def lost(rank: int, step: int, how: str) -> dict[str, str]:
    """What ``LOST_RANK`` reads from its environment."""
    root = str(Path(__file__).parents[2])
    return {"LOST_RANK": str(rank), "LOST_STEP": str(step), "LOST_HOW": how, "PYTHONPATH": root}


class Job:
    """``commands``: one for each rank. What a rank prints goes to a file in ``folder``; with the block its processes end.

    ``metrics`` is the file to which the run writes its steps. A single process is told of no others.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        metrics: Path,
        commands: Sequence[Sequence[str]],
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        environment: Mapping[str, str] = NOTHING,
        start: Callable[[Sequence[str], Path, Mapping[str, str]], Started] = launch,
    ):
        size, self._metrics = len(commands), metrics
        self._printed = [folder / f"{name}-rank-{rank}.txt" for rank in range(size)]
        self._reserved = reserved_port()
        port = port or self._reserved.getsockname()[1]
        self.ranks: list[Started] = []
        for rank, command in enumerate(commands):
            place = rank_environment(rank, size, address, port) if size > 1 else {}
            self.ranks.append(start(command, self._printed[rank], {**place, **environment}))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._reserved.close()
        for process in self.ranks:
            if process.poll() is None:
                kill_group(process)

    def wait_for_steps(self, steps: int) -> None:
        def taken() -> bool:
            return self._metrics.exists() and self._metrics.read_text().count("\n") >= steps

        self.wait(lambda: taken() or self._have_ended(), STARTING)
        assert taken(), self.all_printed()

    def wait_for_end(self, seconds: float = ENDING) -> list[int]:
        """The exit codes of the ranks."""
        self.wait(self._have_ended, seconds)
        return [process.wait() for process in self.ranks]

    def wait(self, happened: Callable[[], bool], seconds: float) -> None:
        """Waits until something has happened."""
        begin = time.monotonic()
        while not happened():
            late = time.monotonic() - begin > seconds
            assert not late, self.all_printed()
            time.sleep(0.02)

    def has_ended(self, rank: int) -> bool:
        return self.ranks[rank].poll() is not None

    def _have_ended(self) -> bool:
        return all(process.poll() is not None for process in self.ranks)

    def is_stopped(self, rank: int) -> bool:
        """Whether SIGSTOP holds it."""
        return Path(f"/proc/{self.ranks[rank].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def printed(self, rank: int) -> str:
        return self._printed[rank].read_text()

    def all_printed(self) -> str:
        return "\n".join(f"---- rank {rank}:\n{self.printed(rank)}" for rank in range(len(self.ranks)))

    def last_line(self, rank: int) -> str:
        return self.printed(rank).splitlines()[-1]


def reserved_port() -> socket.socket:
    """Holds a port of which, until it is closed, nobody listens but who asks for that very port."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
