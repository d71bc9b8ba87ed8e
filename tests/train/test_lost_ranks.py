"""A rank is killed, falls silent or raises in the midst of a step: the others end by themselves, and all name it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.conftest import Runs
from tests.launch import execute
from tests.train.jobs import LOST_RANK, STARTING, lost, under_torchrun

pytestmark = pytest.mark.ranks

TIMEOUT = 10
"""``parallel.timeout`` of the runs, seconds."""
EXPLAINING = 15
"""Seconds that a rank then has to find out who is lost, to say so and to end."""
STEP = 5
HOST = re.escape(socket.gethostname())
LAST_HEARD = rf"when last heard, \d+ s ago, it was running visit 1 of microbatch 1 of step {STEP}"
NOTICED = rf"rank \d \(stage \d(?:, tensor rank \d)?, {HOST}\) noticed while [a-z]+ .+ of step {STEP}"
SEE = r"see \S+/(?:lost|silent)/crash\.json"
GO_ON = "start again with --resume auto"
SETTINGS = [f"parallel.timeout={TIMEOUT}", "checkpoint.every=3", "train.steps=7"]


def is_gone(rank: int, role: str) -> str:
    """The one sentence, as a pattern."""
    who = rf"error: rank {rank} \({role}, {HOST}\) is gone, or has not answered for {TIMEOUT} s"
    return f"{who}; {LAST_HEARD}; {NOTICED}; {SEE}; {GO_ON}"


STORELESS = (
    rf"error: rank 0 \(stage 0\) is gone, or has not answered for {TIMEOUT} s; "
    f"the ranks' store, on the host of rank 0, does not answer either; {NOTICED}; {SEE}; {GO_ON}"
)


@pytest.mark.parametrize(
    ("layout", "size", "how", "rank", "sentence"),
    [
        ("pipeline=3", 3, "kill", 2, is_gone(2, "stage 2")),
        ("zero=1", 2, "kill", 0, STORELESS),
        ("pipeline=2", 2, "stop", 1, is_gone(1, "stage 1")),
        ("pipeline=2", 2, "raise", 0, f"error: rank 0 stopped: shard 3 is damaged; {SEE}; {GO_ON}"),
    ],
    ids=["pp3-killed", "dp2-killed-with-the-store", "pp2-silent", "pp2-raises"],
)
def test_every_other_rank_ends_and_names_the_lost_one(runs: Runs, layout, size, how, rank, sentence):
    faulty = {"script": LOST_RANK, "environment": lost(rank, STEP, how)}
    with runs.start("lost", f"parallel.{layout}", *SETTINGS, ranks=size, **faulty) as job:
        job.wait(lambda: job.is_stopped(rank) if how == "stop" else job.has_ended(rank), STARTING)
        others = [r for r in range(size) if r != rank]
        job.wait(lambda: all(job.has_ended(r) for r in others), TIMEOUT + EXPLAINING)
        for r in others:
            assert job.ranks[r].returncode == 1
            assert re.fullmatch(sentence, job.last_line(r).removeprefix(f"rank {r}: "))
            assert "Traceback" not in job.printed(r)
        (said,) = {job.last_line(r).removeprefix(f"rank {r}: ") for r in others}
    assert [r["step"] for r in runs.records("lost")] == list(range(1, STEP))
    file = runs.path("lost") / "crash.json"
    left = json.loads(file.read_text())
    assert said == f"error: {left['sentence']}; see {file}; {GO_ON}"
    assert left["step"] == STEP and (left["rank"] == rank) == (how == "raise")
    if how == "raise":
        assert left["doing"] == f"running visit 1 of microbatch 1 of step {STEP}"
        assert left["traceback"][-1] == "loopscale.errors.DataError: shard 3 is damaged"
        assert any(re.search(r'lost_rank\.py", line \d+, in fault', line) for line in left["traceback"])


@pytest.mark.parametrize(
    ("silent", "sentence"),
    [
        (2, rf"rank 2 \(stage 2, {HOST}\) is gone, or has not answered for {TIMEOUT} s; when last heard, \d+ s ago, it was .+;"),
        (0, rf"rank 0 \(stage 0\) is gone, or has not answered for {TIMEOUT} s; the ranks' store, .+ does not answer either;"),
    ],
    ids=["rank-2", "rank-0-with-the-store"],
)
def test_a_rank_that_falls_silent_in_a_save_is_named_though_saves_may_take_an_hour(runs: Runs, silent, sentence):
    """The others wait for it in a group of ranks with a timeout of an hour; the watch ends what the group would not."""
    settings = ["parallel.pipeline=3", "checkpoint.every=2", f"parallel.timeout={TIMEOUT}"]
    command = runs.command("silent", *settings, script=str(Path(__file__).with_name("silent_save.py")))
    with runs.job("silent", [command] * 3, environment={"SILENT": str(silent)}) as job:
        job.wait(lambda: job.is_stopped(silent), STARTING)
        others = [rank for rank in range(3) if rank != silent]
        job.wait(lambda: all(map(job.has_ended, others)), TIMEOUT + EXPLAINING)
        for rank in others:
            assert job.ranks[rank].returncode == 1
            noticed = rf"rank \d \(stage \d, {HOST}\) noticed while .+; {SEE}; {GO_ON}"
            assert re.search(rf"error: {sentence} {noticed}", job.printed(rank)), job.all_printed()


def test_torchrun_ends_the_job_the_sentence_is_told_and_the_run_goes_on(runs: Runs):
    """The real thing: torchrun asks the others to end as soon as one is dead, when they have yet to find out which. One
    process goes on."""
    command = under_torchrun(runs.command("lost", "parallel.tensor=2", *SETTINGS, script=LOST_RANK), 2)
    with runs.job("lost", [command], environment=lost(1, STEP, "kill"), start=execute) as job:
        job.wait_for_steps(STEP - 1)
        job.wait(lambda: job.has_ended(0), TIMEOUT + EXPLAINING)
        assert job.ranks[0].returncode == 1
        assert re.search(f"^{is_gone(1, 'stage 0, tensor rank 1')}$", job.printed(0), re.MULTILINE), job.printed(0)
    runs.train("lost", *SETTINGS, options=["--resume", "auto"])
    assert [r["step"] for r in runs.records("lost")] == list(range(1, 8))
    assert "from checkpoints/step-3" in [e["message"] for e in runs.journal("lost")]
    assert [path.name for path in runs.path("lost").glob("crash*")] == ["crash-1.json"]
