"""`loopscale launch logs`, `cancel` and `requeue`, with stubs for SLURM's commands."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest

from loopscale.cluster import commands
from loopscale.cluster.commands import cancel, requeue, show_logs
from loopscale.cluster.ledger import FOLDER, Ledger, write_spec
from loopscale.errors import ClusterError, UsageError


class Slurm:
    """Stubs that know one job's state, and note what they are asked to do."""

    def __init__(self, folder):
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        self.scripts(state="RUNNING")

    def scripts(self, state: str | None, refuses: str = "") -> None:
        bodies = {"squeue": f"echo '12_3|{state}|None'" if state else "true"}
        for name in ("scontrol", "scancel"):
            refusal = "echo 'slurm: Invalid job id' >&2; exit 1" if name == refuses else "true"
            bodies[name] = f"echo {name} $* >> {self.calls}; {refusal}"
        for name, body in bodies.items():
            (self.folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (self.folder / name).chmod(0o755)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Slurm(tmp_path / "bin")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "arm"
    write_spec(folder, {"task": {"launched": str(folder)}, "name": "arm", "steps": 40})
    for event in ("submitted", "started"):
        Ledger(folder).write(event, "12_3", by="u")
    return folder


def last(folder) -> tuple[str, str]:
    event = Ledger(folder).events()[-1]
    return event["event"], event["job"]


def test_cancel_ends_what_lives_and_says_where_there_is_nothing(slurm, run):
    assert cancel([run]) == "cancelled 12_3"
    assert slurm.called() == ["scancel 12_3"] and last(run) == ("cancelled", "12_3")
    slurm.scripts(state="CANCELLED")
    with pytest.raises(UsageError, match="has no job that waits or runs"):
        cancel([run])
    slurm.scripts(state="RUNNING", refuses="scancel")
    with pytest.raises(ClusterError, match="scancel 12_3 failed: slurm: Invalid job id"):
        cancel([run])


@pytest.mark.parametrize("state", ["RUNNING", "FAILED", "CANCELLED", None])
def test_requeue_takes_the_job_that_is_or_was(slurm, run, state):
    slurm.scripts(state)
    assert requeue(run) == "requeued job 12_3"
    assert slurm.called() == ["scontrol requeue 12_3"] and last(run) == ("requeued", "12_3")


def test_requeue_submits_a_new_job_where_the_old_is_forgotten_or_must_change(slurm, run, monkeypatch):
    asked = []
    monkeypatch.setattr("loopscale.cluster.submit.again", lambda folder, overrides: asked.append((folder, overrides)) or "13")
    slurm.scripts(None, refuses="scontrol")
    assert requeue(run) == "submitted job 13"
    assert requeue(run, ["job.exclude=n3"]) == "submitted job 13"
    assert asked == [(run, ()), (run, ["job.exclude=n3"])]


def test_requeue_leaves_alone_what_waits_is_finished_or_cannot_be_changed(slurm, run):
    with pytest.raises(UsageError, match="job 12_3 is there, and SLURM changes no job: `loopscale launch cancel"):
        requeue(run, ["job.exclude=n3"])
    slurm.scripts("PENDING")
    assert requeue(run) == "job 12_3 waits already"
    Ledger(run).write("finished", "12_3")
    slurm.scripts("COMPLETED")
    with pytest.raises(UsageError, match=r"has finished; give another run\.name"):
        requeue(run)
    assert slurm.called() == []


def test_logs_follow_every_rank_line_by_line_until_the_job_has_ended(slurm, run, monkeypatch):
    monkeypatch.setattr(commands, "POLL", 0.02)
    monkeypatch.setattr(commands, "STATE_EVERY", 0.1)
    logs = run / FOLDER / "logs"
    logs.mkdir()
    (logs / "12_3_0_log.out").write_text("a\n")
    (logs / "12_3_1_log.err").write_text("half a li")
    out = io.BytesIO()
    follower = threading.Thread(target=show_logs, args=(run, True, out))
    follower.start()
    deadline = time.monotonic() + 20
    while b"a\n" not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert out.getvalue() == b"[0] a\n"
    with (logs / "12_3_1_log.err").open("a") as log:
        log.write("ne\nthe end, without a newline")
    slurm.scripts("COMPLETED")
    follower.join(20)
    assert out.getvalue() == b"[0] a\n[1] half a line\n[1] the end, without a newline"
