"""`loopscale launch local`: the ranks of one terminal."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.conftest import Runs
from tests.launch import execute
from tests.train.jobs import Job

pytestmark = pytest.mark.ranks


def launched(runs: Runs, name: str, *overrides: str) -> Job:
    python, *rest = runs.command(name, *overrides)
    place = rest.index("train")
    command = [python, *rest[:place], "launch", "local", *rest[place + 1 :], "--nproc", "2", "--resume", "auto"]
    return runs.job(name, [command], start=execute, environment={"PYTHONPATH": str(Path(__file__).parents[2])})


def test_two_ranks_print_behind_their_number_and_train_as_one_process_does(runs):
    with launched(runs, "two", "train.steps=5") as job:
        assert job.wait_for_end() == [0], job.all_printed()
        printed = job.printed(0)
    assert re.search(r"^\[0\] layout   2 processes · cpu float32", printed, re.MULTILINE), printed
    assert all(line.startswith(("[0] ", "[1] ")) for line in printed.splitlines())
    runs.train("one", "train.steps=5")
    two, one = ([record["loss"] for record in runs.records(name)] for name in ("two", "one"))
    assert two == pytest.approx(one, abs=1e-5) and len(two) == 5


def test_one_ctrl_c_saves_and_ends_all_ranks_and_the_same_command_goes_on(runs):
    settings = ["train.steps=60", "checkpoint.every=0", "corpus.workers=1"]
    with launched(runs, "stopped", *settings) as job:
        job.wait_for_steps(3)
        below = psutil.Process(job.ranks[0].pid).children(recursive=True)
        job.ranks[0].send_signal(signal.SIGINT)
        assert job.wait_for_end() == [75], job.all_printed()
        assert len(below) >= 4  # two ranks, each with a reader
        assert not psutil.wait_procs(below, timeout=10)[1]
    saved = [event["step"] for event in runs.journal("stopped") if event["kind"] == "saved"]
    assert len(saved) == 1 and len(runs.records("stopped")) == saved[0] < 60
    with launched(runs, "stopped", *settings) as job:
        assert job.wait_for_end() == [0], job.all_printed()
    assert [record["step"] for record in runs.records("stopped")] == list(range(1, 61))


def test_a_mistake_is_told_once(runs):
    with launched(runs, "wrong", "parallel.tensor=3") as job:
        assert job.wait_for_end() == [2], job.all_printed()
        assert job.printed(0).count("does not divide") == 1
