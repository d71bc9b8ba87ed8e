"""Two hosts with a rank each: the link carries the curve of one process, and both ends tell when it is cut or silent.

The hosts are network namespaces of this machine. A rank is the real thing, started on its host.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Runs
from tests.launch import execute

NETLAB = Path(__file__).parents[2].parent / "shared" / "cluster" / "netlab"
CANNOT = (
    "../shared/cluster/netlab is not there" if not NETLAB.exists() else "network namespaces need root" if os.geteuid() else ""
)
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(CANNOT), reason=CANNOT)]

TIMEOUT = 10
"""``parallel.timeout`` of the runs, seconds."""
EXPLAINING = 20
"""Seconds that a rank then has to find out who is lost, to say so and to end."""
STEPS = 6
SETTINGS = [f"parallel.timeout={TIMEOUT}", "train.steps=4000", "checkpoint.every=0"]
GO_ON = "start again with --resume auto"


@pytest.fixture(scope="module")
def netlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """Two hosts, h1 and h2, apart from any other use of the script. Gives its command line."""
    folder = tmp_path_factory.mktemp("netlab") / "hosts"
    own = [f"NETLAB_DIR={folder}", "NETLAB_SUBNET=10.83.7", f"NETLAB_PREFIX=ls{os.getpid()}"]

    def command(*arguments: str) -> list[str]:
        return ["env", *own, str(NETLAB), *arguments]

    try:
        subprocess.run(command("up", "2"), check=True)
        yield command
    finally:
        subprocess.run(command("down"), check=True)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, text_corpus: Path) -> Runs:
    """The first steps of the same run on one process."""
    runs = Runs(tmp_path_factory.mktemp("one"), text_corpus)
    with runs.start("one", *SETTINGS) as job:
        job.wait_for_steps(STEPS)
    return runs


@pytest.mark.parametrize(
    ("layout", "fault", "roles"),
    [("pipeline=2", "cut", ("stage 0", "stage 1")), ("tensor=2", "drop", ("stage 0, tensor rank 0", "stage 0, tensor rank 1"))],
)
def test_a_link_carries_the_curve_of_one_process_and_both_ends_tell_of_its_end(
    netlab, one_process: Runs, runs: Runs, layout, fault, roles
):
    command = runs.command("far", f"parallel.{layout}", *SETTINGS)
    commands = [netlab("on", host, *command) for host in ("h1", "h2")]
    subprocess.run(netlab("mend", "h2"), check=True)
    one_rank_a_host = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with runs.job("far", commands, address="h1", port=29500, environment=one_rank_a_host, start=execute) as job:
        job.wait_for_steps(STEPS)
        time.sleep(1.5)  # until a step has been reported
        subprocess.run(netlab(fault, "h2"), check=True)
        job.wait(lambda: all(job.has_ended(rank) for rank in (0, 1)), TIMEOUT + EXPLAINING)
        assert [p.returncode for p in job.ranks] == [1, 1]
        assert not any("Traceback" in job.printed(rank) for rank in (0, 1))
        gone = f"is gone, or has not answered for {TIMEOUT} s"
        noticed = [rf"rank {rank} \({roles[rank]}, h{rank + 1}\) noticed while [a-z]+ .+ of step \d+; {GO_ON}" for rank in (0, 1)]
        heard = r"when last heard, \d+ s ago, it was [a-z]+ .+ of step \d+"
        assert re.fullmatch(rf"error: rank 1 \({roles[1]}, h2\) {gone}; {heard}; {noticed[0]}", job.last_line(0))
        storeless = "the ranks' store, on the host of rank 0, does not answer either"
        assert re.fullmatch(rf"rank 1: error: rank 0 \(stage 0\) {gone}; {storeless}; {noticed[1]}", job.last_line(1))
    expected, found = (one.records(name)[:STEPS] for one, name in ((one_process, "one"), (runs, "far")))
    assert [r["depths"] for r in found] == [r["depths"] for r in expected]
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in found] == pytest.approx([r[key] for r in expected], rel=1e-5)
