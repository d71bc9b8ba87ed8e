"""A real SLURM on this machine, by the script `slurm-local` beside this file, and runs that are launched on it.

It needs root on a Debian machine, whose packages it installs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from loopscale.cluster.ledger import Ledger
from loopscale.cluster.status import Standing, standings
from tests.conftest import TINY

SCRIPT = Path(__file__).with_name("slurm-local")
ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    """Why no SLURM can be brought up here; None where it can be tried."""
    if os.geteuid():
        return "a SLURM of one machine needs root"
    needed = ("slurmctld", "slurmd", "munged", "sbatch", "ip")
    if any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in needed) and not shutil.which("apt-get"):
        return "SLURM is not installed, and there is no apt-get to install it"
    return None


class CannotRun(Exception):
    """This machine installs no SLURM, or lets nobody make namespaces."""


class Cluster:
    """``nodes`` hosts with an address and a /var/tmp of their own, each claiming four CPUs."""

    def __init__(self, folder: Path, nodes: int, accounting: bool = False):
        self.folder, self.nodes = folder, nodes
        self.given = {
            "SLURM_LOCAL_DIR": str(folder / "slurm"), "SLURM_LOCAL_NODES": str(nodes), "SLURM_LOCAL_TMPFS": "/var/tmp",
            "SLURM_LOCAL_ACCT": str(int(accounting)),
        }  # fmt: skip

    def __call__(self, *words: str, timeout: float = 300) -> str:
        """Runs `slurm-local`; returns what it printed."""
        done = subprocess.run([SCRIPT, *words], env={**os.environ, **self.given}, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            told = f"slurm-local {' '.join(words)}: {done.stdout}{done.stderr}"
            raise CannotRun(told) if "cannot install" in told or "not permitted" in told else RuntimeError(told)
        return done.stdout

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """From up to down; this process and those that it starts see the cluster."""
        self("up")
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = f"{self.folder}/slurm/etc/slurm.conf"
        try:
            yield self
        finally:
            self("down", "--purge")
            os.environ.pop("SLURM_CONF")
            if before is not None:
                os.environ["SLURM_CONF"] = before

    def preempt(self, seconds: int = 2) -> None:
        """A more urgent job takes all nodes for a while."""
        command = ["sbatch", "--partition=urgent", f"--nodes={self.nodes}", "--exclusive", "--output=/dev/null"]
        subprocess.run([*command, f"--wrap=sleep {seconds}"], check=True, capture_output=True)


class Launched:
    """A run that `loopscale launch slurm` starts in ``folder``."""

    def __init__(self, folder: Path, corpus: Path, name: str):
        self.folder, self.corpus, self.name = folder, corpus, name
        self.path = folder / "runs" / name
        self.ledger = Ledger(self.path)

    def submit(
        self,
        *overrides: str,
        nodes: int,
        devices: int,
        config: Path | None = None,
        code: Path = ROOT,
        cluster: Sequence[str] = (),
    ) -> str:
        """Submits it, ``config`` or a tiny one, with the package of ``code``; returns what the command printed."""
        file = ROOT / "configs/cluster/local.yaml"
        if config is None:
            config = self.folder / "tiny.yaml"
            config.write_text(yaml.safe_dump(TINY))
        asked = [f"cluster.job.nodes={nodes}", f"cluster.job.devices={devices}", *(f"cluster.{o}" for o in cluster)]
        return self.command(
            "slurm", str(config), "--cluster", str(file), f"run.name={self.name}", f"corpus.path={self.corpus}",
            *asked, *overrides, code=code,
        )  # fmt: skip

    def command(self, *words: str, code: Path = ROOT) -> str:
        """Runs `loopscale launch …` in the folder."""
        environment = {**os.environ, "PYTHONPATH": str(code)}
        done = subprocess.run(
            [sys.executable, "-m", "loopscale", "launch", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"launch {' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def standing(self) -> Standing:
        return standings([self.path], self.folder / "runs")[0]

    def records(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def wait(self, happened: Callable[[], bool], seconds: float = 240) -> float:
        """Waits until something has happened; returns how long it took."""
        began = time.monotonic()
        while not happened():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"{self.standing()}\n{self.ledger.events()}\n{self.printed()}")
            time.sleep(0.2)
        return time.monotonic() - began

    def wait_for_step(self, step: int) -> float:
        return self.wait(lambda: bool(found := self.records()) and found[-1]["step"] >= step)

    def wait_for_state(self, state: str) -> float:
        return self.wait(lambda: self.standing().state == state)

    def printed(self) -> str:
        logs = sorted((self.path / "launch/logs").glob("*_log.*"))
        return "\n".join(f"---- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
