"""Requests to stop: at any moment, to any rank, within the grace, and by the run's own limit of time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscale.checkpoint.commit import Folder, damage, read_manifest
from loopscale.train.limit import JOB_BEGAN, LEAVING, WRITING, TimeLimit
from loopscale.train.signals import INTERRUPTED, ONE_NOTICE
from tests.conftest import Runs
from tests.launch import execute
from tests.train.jobs import STARTING, under_torchrun

ROOT = str(Path(__file__).parents[2])
STANDS = "; the last checkpoint stands, go on with --resume auto"
BUSY = 'hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)'
"""Minutes inside a library, which signals do not interrupt."""


def asked(*lines: str, grace: float = 60) -> subprocess.Popen[str]:
    """A process that listens and runs ``lines``; it has printed "ready"."""
    script = ["import hashlib, multiprocessing, os, signal, sys, time", "from loopscale.train.signals import StopRequest"]
    script += [f"stop = StopRequest({grace})", "stop.listen()", *lines]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": ROOT, "RANK": "1"}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_before_the_first_step_a_signal_ends_the_process_though_it_is_inside_a_library(number):
    process = asked('print("ready", flush=True)', BUSY)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED == 75
    assert said == f"rank 1: asked to stop by {number.name} before the first step; start again with --resume auto\n"


def test_the_first_signal_sets_a_flag_and_its_echo_changes_nothing():
    """torchrun sends the ranks what their process group has got already."""
    process = asked(
        "stop.begin()", 'print("ready", flush=True)', "while stop.name is None: time.sleep(0.01)", "time.sleep(1)",
        "print(stop.name)", "stop.close()", "sys.exit(3)",
    )  # fmt: skip
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (said.split(), process.returncode) in ((["SIGUSR1"], 3), (["SIGTERM"], 3))


def test_a_second_signal_ends_the_process():
    process = asked("stop.begin()", 'print("ready", flush=True)', BUSY)
    process.send_signal(signal.SIGUSR1)
    time.sleep(ONE_NOTICE + 0.5)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "asked to stop again, by SIGTERM, and ends at once; the last checkpoint stands" in said


def test_the_end_of_the_grace_ends_the_process_and_its_readers():
    """The reader ignores signals, as those of a run do."""
    process = asked(
        "def read():", "    signal.signal(signal.SIGTERM, signal.SIG_IGN)", "    time.sleep(600)",
        "reader = multiprocessing.Process(target=read)", "reader.start()", "stop.begin()",
        'print("ready", flush=True)', "print(reader.pid, flush=True)", BUSY, grace=1,
    )  # fmt: skip
    reader = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert said == f"rank 1: has not ended within train.grace 1 s of SIGTERM{STANDS}\n"
    reader.wait(10)


def test_the_grace_of_another_ranks_signal_holds_here_too():
    process = asked("stop.begin()", "stop.begin_grace()", 'print("ready", flush=True)', BUSY, grace=0.5)
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED and "within train.grace 0.5 s of a signal to another rank" in said


def test_a_run_that_ends_with_an_error_may_say_so_and_is_not_one_to_be_started_again():
    """torchrun's signal when another rank has died."""
    lines = ["stop.begin()", "stop.fail()", 'print("ready", flush=True)']
    process = asked(*lines, "time.sleep(1)", "sys.exit(7)")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 7
    process = asked(*lines, BUSY, grace=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 1


def test_when_it_is_closed_signals_are_what_they_were():
    process = asked("stop.close()", 'print("ready", flush=True)', "time.sleep(600)")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


# ---- the limit of time


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 5), st.integers(0, 2000), st.randoms())
def test_a_run_ends_before_its_limit_and_uses_the_time_it_has(longest, save, every, seconds, draw):
    """Steps of up to ``longest`` seconds and saves of up to ``save``, the first of either the longest; a clock that jumps."""
    age = [7.0]
    last = age[0] + 2 * (longest + save) + LEAVING + seconds
    limit = TimeLimit(last, save * WRITING, age=lambda: age[0])
    for step in range(10_000):
        began, reason = age[0], limit.reason()
        age[0] += draw.randint(1, longest) if step else longest
        if reason is not None or (every and step % every == 0):
            with limit.aside():
                took = draw.randint(1, save) if step else save
                age[0] += took
            limit.saw_save(took)
        if reason is not None:
            break
    assert last - 2 * (longest + save) - LEAVING < began and age[0] + LEAVING <= last
    assert reason.startswith(f"train.max_time {last:g} s, nearly up")


def test_without_a_limit_a_run_goes_on():
    assert TimeLimit(None, 1e12).reason() is None


def test_the_clock_of_the_limit_began_with_the_process():
    age = time.time() - psutil.Process().create_time()
    assert TimeLimit(age + 60, WRITING).reason() is None
    assert TimeLimit(age, WRITING).reason() is not None


def test_where_a_launcher_says_when_its_job_began_the_time_counts_from_there(monkeypatch):
    monkeypatch.setenv(JOB_BEGAN, str(time.time() - 5000))
    assert TimeLimit(5060, WRITING).reason() is None
    assert TimeLimit(5000, WRITING).reason() is not None


# ---- whole runs


@pytest.mark.ranks
def test_a_run_that_is_asked_to_stop_while_it_imports_leaves_nothing_behind(runs: Runs):
    """The real thing, for a fork would have imported everything."""
    with runs.job("early", [runs.command("early")], start=execute) as job:
        maps = Path(f"/proc/{job.ranks[0].pid}/maps")
        job.wait(lambda: "libtorch_cpu" in maps.read_text(), STARTING)
        job.ranks[0].send_signal(signal.SIGTERM)
        assert job.wait_for_end() == [INTERRUPTED]
        assert job.printed(0) == "asked to stop by SIGTERM before the first step; start again with --resume auto\n"
    assert not runs.path("early").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("to", ["rank 1 alone", "all processes", "torchrun"])
def test_two_ranks_with_readers_stop_at_a_signal_and_all_their_processes_are_gone(runs: Runs, to: str):
    """What one rank hears stops both. A scheduler's notice to all processes reaches the readers too, and torchrun, which
    passes it on to ranks that have got it already."""
    grace = 60
    command = runs.command("asked", "train.steps=4000", "corpus.workers=1", f"train.grace={grace}")
    real = {"commands": [under_torchrun(command, 2)], "start": execute}
    with runs.job("asked", **(real if to == "torchrun" else {"commands": [command] * 2})) as job:
        job.wait_for_steps(3)
        processes = [q for p in job.ranks for q in (psutil.Process(p.pid), *psutil.Process(p.pid).children(recursive=True))]
        assert len(processes) >= 4
        for process in [psutil.Process(job.ranks[1].pid)] if to == "rank 1 alone" else processes:
            process.send_signal(signal.SIGUSR1 if to == "rank 1 alone" else signal.SIGTERM)
        assert job.wait_for_end(grace) == ([1] if to == "torchrun" else [INTERRUPTED] * 2), job.all_printed()
        assert psutil.wait_procs(processes, grace)[1] == []
    step, *_ = Folder(runs.path("asked") / "checkpoints").steps()
    checkpoint = runs.path("asked") / "checkpoints" / f"step-{step}"
    assert damage(checkpoint, read_manifest(checkpoint).files) is None
    step = runs.records("asked")[-1]["step"]
    assert checkpoint.name == f"step-{step}"
    told = runs.journal("asked")[-1]
    assert told["kind"] == "stopped" and told["step"] == step
    assert re.fullmatch(r"asked to stop by SIG(USR1 \(rank 1\)|TERM \(rank \d\)); go on with --resume auto", told["message"])


@pytest.mark.ranks
def test_a_save_that_hangs_ends_with_the_grace_and_the_last_checkpoint_stands(runs: Runs):
    """Rank 1 hears the signal, rank 0 hangs inside the commit, behind step 5's. The run then goes on as if nothing had been."""
    with runs.start("hangs", "train.grace=3", ranks=2, script=str(Path(__file__).with_name("hanging_save.py"))) as job:
        job.wait_for_steps(6)
        job.ranks[1].send_signal(signal.SIGTERM)
        assert job.wait_for_end() == [INTERRUPTED] * 2, job.all_printed()
        assert job.last_line(0) == f"has not ended within train.grace 3 s of a signal to another rank{STANDS}"
        assert job.last_line(1) == f"rank 1: has not ended within train.grace 3 s of SIGTERM{STANDS}"
    checkpoints = runs.path("hangs") / "checkpoints"
    assert Folder(checkpoints).steps() == [5]
    assert list(checkpoints.glob("*.writing"))
    assert damage(checkpoints / "step-5", read_manifest(checkpoints / "step-5").files) is None
    runs.train("hangs", ranks=2, options=["--resume", "auto"])
    runs.train("calm", ranks=2)
    assert [r["loss"] for r in runs.records("hangs")] == [r["loss"] for r in runs.records("calm")]


@pytest.mark.ranks
def test_a_run_saves_before_its_time_is_up_and_goes_on_as_if_nothing_had_been(runs: Runs):
    """First with less time than there is; a step is done all the same, so that such jobs in a row come to an end."""
    steady = ["optimizer.schedule=constant", "optimizer.warmup=0"]  # or another number of steps would be another run
    runs.train("timed", "train.steps=4000", *steady, "train.max_time=0.5", exit_code=INTERRUPTED)
    assert [r["step"] for r in runs.records("timed")] == [1]

    seconds = 15
    timed = [*steady, "train.steps=4000", f"train.max_time={seconds}"]
    with runs.start("timed", *timed, options=["--resume", "auto"]) as job:
        began = psutil.Process(job.ranks[0].pid).create_time()
        assert job.wait_for_end() == [INTERRUPTED], job.printed(0)
        assert time.time() - began < seconds
    told = runs.journal("timed")[-1]
    assert told["kind"] == "stopped"
    assert re.match(
        rf"asked to stop by train\.max_time {seconds} s, nearly up \(.*\); go on with --resume auto$", told["message"]
    )
    steps = runs.records("timed")[-1]["step"]
    assert Folder(runs.path("timed") / "checkpoints").steps()[0] == steps > 1

    runs.train("timed", *steady, f"train.steps={steps + 3}", options=["--resume", "auto"])
    runs.train("calm", *steady, f"train.steps={steps + 3}")
    assert [r["loss"] for r in runs.records("timed")] == [r["loss"] for r in runs.records("calm")]
    ours, theirs = runs.weights("timed", steps + 3), runs.weights("calm", steps + 3)
    assert all((ours[n] == theirs[n]).all() for n in ours)
