"""What ranks find out before the first step, with each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscale.cluster.ledger import FOLDER
from loopscale.cluster.preflight import turns
from loopscale.cluster.world import World
from loopscale.config.cluster import PreflightConfig

ROOT = Path(__file__).parents[2]
SETTINGS = {"timeout": 30, "disk": 0.001, "shm": 0, "matmul_share": 0.01, "network_share": 0.01}


@given(st.integers(1, 40))
def test_every_link_of_the_ring_is_measured_once_and_no_node_has_two_at_a_time(nodes):
    found = turns(nodes)
    assert sorted(link for turn in found for link in turn) == ([(i, (i + 1) % nodes) for i in range(nodes)] if nodes > 1 else [])
    assert len(found) <= 3
    for turn in found:
        ends = [end for link in turn for end in link]
        assert len(ends) == len(set(ends))


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(folder: Path, ranks: int, come: int, needed: int, **settings: object) -> list[subprocess.Popen[str]]:
    """Starts the first ``come`` of ``ranks`` ranks, each of a node of this machine's address."""
    (folder / FOLDER / "ends").mkdir(parents=True)
    (folder / FOLDER / "token").write_text("t")
    asked = {
        "run": str(folder), "token": "t", "nodes": ["127.0.0.1"] * ranks, "needed": needed, "gpus": False,
        "ends": [str(folder / FOLDER / "ends" / str(rank)) for rank in range(ranks)], "settings": {**SETTINGS, **settings},
    }  # fmt: skip
    PreflightConfig(**asked["settings"])
    at = port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "loopscale.cluster.preflight", json.dumps(asked)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **World(tuple(asked["nodes"]), 1, rank, 0, at).variables()},
        )
        for rank in range(come)
    ]  # fmt: skip


def verdicts(processes: list[subprocess.Popen[str]]) -> list[dict]:
    return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]


@pytest.mark.ranks
def test_fit_ranks_hear_one_verdict_and_their_rates_are_kept(tmp_path):
    said = verdicts(meet(tmp_path, ranks=2, come=2, needed=2, interface="lo"))
    assert said == [{"sick": {}, "refused": None}] * 2
    found = json.loads((tmp_path / FOLDER / "preflight.json").read_text())["ranks"]
    assert all(found[rank]["matmul"] > 1e8 and found[rank]["received"] > 1e6 for rank in "01")
    assert abs(found["1"]["clock"]) < 5 and found["0"]["versions"] == found["1"]["versions"]


@pytest.mark.ranks
def test_a_rank_that_ended_early_is_told_at_once_with_its_reason(tmp_path):
    began = time.monotonic()
    processes = meet(tmp_path, ranks=2, come=1, needed=2, interface="lo", timeout=300)
    (tmp_path / FOLDER / "ends/1").write_text("ModuleNotFoundError: No module named 'torch'")
    (said,) = verdicts(processes)
    reason = "rank 1 has not come within 300 s: ModuleNotFoundError: No module named 'torch'"
    assert said["sick"] == {"127.0.0.1": [reason]} and reason in said["refused"]
    assert time.monotonic() - began < 120
