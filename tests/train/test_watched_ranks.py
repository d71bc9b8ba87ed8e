"""Ranks that hang, lag or go wrong while all are alive: the run says which one it is."""

from __future__ import annotations

import json
import re
import socket
from statistics import median

import pytest

from tests.conftest import Runs
from tests.train.jobs import LOST_RANK, lost

pytestmark = pytest.mark.ranks

HOST = re.escape(socket.gethostname())
STEP = 3
THREE = ["batch.global_batch=12", "checkpoint.every=0"]
"""Sizes that three replicas can share."""


def end(runs: Runs, ranks: int, settings: list[str], how: str, rank: int, seconds: float = 0.0) -> list[str]:
    """Runs to the end with an odd rank; returns what each rank printed."""
    environment = {**lost(rank, STEP, how), "LOST_SECONDS": str(seconds)}
    with runs.start("odd", *settings, ranks=ranks, script=LOST_RANK, environment=environment) as job:
        assert job.wait_for_end() == [1 if how == "flip" else 0] * ranks, job.all_printed()
        return [job.printed(r) for r in range(ranks)]


@pytest.mark.parametrize(
    ("layout", "role"),
    [("pipeline=2", "stage 1"), ("tensor=2", "stage 0, tensor rank 1"), ("zero=1", "stage 0")],
    ids=["a message", "a sum inside a layer", "a sum over all"],
)
def test_a_rank_that_sleeps_is_named_while_it_is_alive_and_the_run_ends_well(runs: Runs, layout, role):
    """Rank 0 waits for what rank 1 has yet to send, or for its part in a sum."""
    settings = [f"parallel.{layout}", "train.stuck_after=2", "parallel.timeout=100", "train.steps=4"]
    printed = end(runs, 2, settings, "sleep", rank=1, seconds=8)
    (told,) = re.findall(r"warning: step 3 has taken \d+ s so far; the likely cause first:\n(.+)\n(.+)\n", printed[0])
    doing = rf"has been [a-z]+ .+ of step {STEP} for \d+ s and waits for"
    assert re.fullmatch(rf"  rank 1 \({role}, {HOST}\) {doing} nobody, at lost_rank\.py:\d+", told[0])
    assert re.fullmatch(rf"  rank 0 \(stage 0.*, {HOST}\) {doing} rank 1", told[1])
    left = (runs.path("odd") / "stuck.txt").read_text()
    assert re.match(r"\S+ step 3 has taken ", left) and left.splitlines()[1:] == list(told)
    assert "so far" not in printed[1]
    assert [r["step"] for r in runs.records("odd")] == [1, 2, 3, 4]
    assert not (runs.path("odd") / "crash.json").exists()


def test_a_rank_that_sleeps_too_long_ends_the_run_and_is_named_although_it_is_alive(runs: Runs):
    """Its peer's wait in a sum over both ends after 8 s; when it wakes, after 12 s, it finds nobody."""
    environment = {**lost(1, STEP, "sleep"), "LOST_SECONDS": "12"}
    with runs.start("odd", "parallel.timeout=8", ranks=2, script=LOST_RANK, environment=environment) as job:
        assert job.wait_for_end() == [1, 1]
        said = job.last_line(0)
    assert re.fullmatch(
        rf"error: rank 1 \(stage 0, {HOST}\) is gone, or has not answered for 8 s; when last heard, \d s ago, it was running "
        rf"visit 1 of microbatch 1 of step {STEP}; rank 0 \(stage 0, {HOST}\) noticed while adding up losses and gradients of "
        rf"step {STEP}; see \S+; start again with --resume auto",
        said,
    )


def test_a_slow_rank_is_named_once_and_its_working_time_shows(runs: Runs):
    """Three replicas, of which one sleeps in each of its visits; the others wait for it, which is no work of theirs."""
    pause = 0.25
    end(runs, 3, [*THREE, "depth.prior=fixed", "train.steps=10", "log.every=2"], "slow", rank=2, seconds=pause)
    records = runs.records("odd")
    visits = 2 * 3  # of its two microbatches
    for record in records:
        busy, step = record["busy"], 3 * 4 * 32 / record["tokens_per_s"]
        assert len(busy) == 3
        assert busy[2] >= visits * pause
        assert all(own <= step for own in busy)
    assert all(median(r["busy"][rank] for r in records) < visits * pause for rank in (0, 1))
    (told,) = [e for e in runs.journal("odd") if e["kind"] == "warning"]
    said = rf"rank 2 \(stage 0, {HOST}\) works (\S+) times as long at a step as the median of the 3 ranks of its stage"
    assert told["step"] == 10 and float(re.fullmatch(said, told["message"])[1]) > 1.5


@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_bit_in_one_replica_is_found_at_the_next_check(runs: Runs, size):
    """The flip happens within step 3, the check before step 5."""
    settings = [*THREE, "parallel.zero=0", "parallel.check_replicas=2", "checkpoint.every=2", "checkpoint.keep=9"]
    printed = end(runs, size, settings, "flip", rank=1)
    odd = [1] if size == 3 else [0, 1]
    named = ", ".join(rf"rank {rank} \(stage 0, {HOST}\)" for rank in odd)
    how = "is not what 2 other ranks hold" if size == 3 else "should be the same on all of them and is not"
    whose = "that rank" if size == 3 else "one of these ranks"
    sentence = (
        rf"error: replicas have come apart: core\.0\.attention_norm on {named} {how}; go on from the last checkpoint with "
        rf"--resume auto; if it happens again, the machine of {whose} is suspect"
    )
    for rank in range(size):
        assert re.fullmatch(sentence, printed[rank].splitlines()[-1].removeprefix(f"rank {rank}: ")), printed[rank]
    assert [r["step"] for r in runs.records("odd")] == [1, 2, 3, 4]
    assert "replicas have come apart" in json.loads((runs.path("odd") / "crash.json").read_text())["sentence"]
