"""How a run stands, from SLURM's word and its ledger's."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from loopscale.cluster import status
from loopscale.cluster.ledger import FOLDER, Ledger, write_spec
from loopscale.cluster.status import Standing, find_run, find_runs, launched, log_files, standings, state_of
from loopscale.errors import UsageError

LONG_AGO = (datetime.now(UTC) - timedelta(hours=1)).isoformat()


def told(*names: str) -> list[dict]:
    """Events of job 7, as name or name: message."""
    split = [name.partition(": ") for name in names]
    return [{"event": event, "job": "7", "message": message, "time": LONG_AGO} for event, _, message in split]


@pytest.mark.parametrize(
    ("events", "slurm", "expected"),
    [
        (["submitted"], ("PENDING", "Priority"), ("PENDING", "priority")),
        (["submitted", "started"], ("RUNNING", "None"), ("RUNNING", "")),
        (["submitted", "started", "excluded: b: slow"], ("RUNNING", "None"), ("RUNNING", "without b: slow")),
        (["submitted", "started", "finished"], ("COMPLETED", "None"), ("COMPLETED", "")),
        (["submitted", "started", "finished"], ("COMPLETING", "None"), ("COMPLETED", "")),
        (["submitted", "started", "finished"], None, ("COMPLETED", "")),
        # what will run again is pending, whatever it is called
        (["submitted", "started"], ("PREEMPTED", "None"), ("PENDING", "preempted, to run again")),
        (["submitted", "started", "interrupted: SIGTERM"], ("REQUEUED", "None"), ("PENDING", "SIGTERM, queued again")),
        (["submitted", "started", "interrupted: SIGTERM"], ("RUNNING", "None"), ("PENDING", "SIGTERM, queued again")),
        (["submitted", "started", "interrupted: SIGTERM"], ("COMPLETING", "None"), ("PENDING", "SIGTERM, queued again")),
        (["submitted", "started", "interrupted: SIGTERM"], ("PENDING", "BeginTime"), ("PENDING", "SIGTERM, queued again")),
        (
            ["submitted", "started", "fault: rank 1 is gone"],
            ("PENDING", "BeginTime"),
            ("PENDING", "rank 1 is gone, queued again"),
        ),
        (["submitted", "started", "interrupted: SIGTERM", "started"], ("RUNNING", "None"), ("RUNNING", "")),
        # what ended
        (["submitted", "started", "failed: loss is nan"], ("FAILED", "NonZeroExitCode"), ("FAILED", "loss is nan")),
        (["submitted", "started", "refused: b is sick"], None, ("FAILED", "b is sick")),
        (["submitted", "started", "cancelled: by u"], ("CANCELLED", "None"), ("CANCELLED", "by u")),
        (["submitted", "started", "cancelled: by u", "interrupted: SIGTERM"], None, ("CANCELLED", "by u")),
        (["submitted", "started", "cancelled: by u", "requeued"], ("PENDING", "None"), ("PENDING", "")),
        (["submitted", "started"], ("TIMEOUT", "TimeLimit"), ("TIMEOUT", "")),
        (["submitted", "started"], ("NODE_FAIL", "None"), ("NODE_FAIL", "")),
        (["submitted"], ("FAILED", "NonZeroExitCode"), ("FAILED", "")),
        (["submitted", "started"], ("FAILED", "NonZeroExitCode"), ("FAILED", "its job has ended without a word")),
        # without a trace
        (["submitted", "started"], None, ("LOST", "its job has ended without a word")),
        (["submitted", "started"], ("COMPLETED", "None"), ("LOST", "its job has ended without a word")),
        (["submitted"], None, ("LOST", "")),
        ([], None, ("LOST", "it has never been submitted")),
    ],
)
def test_a_state_is_told_as_it_is(events, slurm, expected):
    assert state_of(told(*events), {"7": slurm} if slurm else {}) == expected


def test_a_job_that_slurm_has_not_heard_of_yet_is_pending():
    fresh = [{**told("submitted")[0], "time": datetime.now(UTC).isoformat()}]
    assert state_of(fresh, {}) == ("PENDING", "")


def test_of_a_chain_the_job_that_runs_counts():
    events = [*told("submitted"), {**told("submitted")[0], "job": "8"}, *told("started", "interrupted: time")]
    assert state_of(events, {"7": ("FAILED", "x"), "8": ("PENDING", "Dependency")}) == ("PENDING", "time, queued again")


@pytest.fixture
def run(tmp_path):
    """A run of a study, half way, whose job runs for the second time."""
    folder = tmp_path / "study/arm-s1"
    write_spec(folder, {"task": {"launched": str(tmp_path / "study")}, "name": "study", "steps": 400})
    ledger = Ledger(folder)
    for event in ("submitted", "started", "interrupted", "started"):
        ledger.write(event, "12_3", "SIGTERM" if event == "interrupted" else "", saved=0, by="u")
    records = [{"step": 10, "loss": 9.0}, {"step": 100, "loss": 4.25, "tokens_per_s": 2000.0, "elapsed": 50.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 11')
    logs = tmp_path / "study" / FOLDER / "logs"
    logs.mkdir(parents=True)
    for name in ("12_3_0_log.out", "12_3_1_log.err", "12_30_0_log.out", "12_3_submitted.pkl"):
        (logs / name).write_text("x\n")
    return folder


def test_a_row_has_progress_rate_time_left_and_restarts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "job_states", lambda events: {"12_3": ("RUNNING", "None")})
    assert standings([run], tmp_path) == [Standing("study/arm-s1", "RUNNING", 100, 400, 4.25, 2000.0, 150.0, 1, "")]


def test_a_job_that_died_is_told_with_its_last_words_and_the_command_that_goes_on(run, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "job_states", lambda events: {})
    go_on = "`loopscale launch requeue study/arm-s1` goes on"
    (row,) = standings([run], tmp_path)
    assert (row.state, row.note, row.left) == ("LOST", f"its job has ended without a word; {go_on}", None)
    Ledger(run).write("submitted", "13", by="u")
    monkeypatch.setattr(status, "JUST_SUBMITTED", -1.0)
    (run / FOLDER / "ends").mkdir()
    (run / FOLDER / "ends" / "13.0.batch").write_text("setup failed: module load cuda\n")
    assert standings([run], tmp_path)[0].note == f"setup failed: module load cuda; {go_on}"


def test_runs_are_found_by_name_or_path_and_their_logs_by_job(run, tmp_path):
    assert launched(tmp_path) == [run] == [find_run("study/arm-s1", tmp_path)] == [find_run(str(run), tmp_path)]
    assert [path.name for path in log_files(run)] == ["12_3_0_log.out", "12_3_1_log.err"]
    with pytest.raises(UsageError, match=r"arm is no launched run of .+ \(there: study/arm-s1\)"):
        find_run("arm", tmp_path)


def test_damaged_files_hide_no_run_but_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "job_states", lambda events: {"12_3": ("RUNNING", "None")})
    whole = Ledger(run).path.read_bytes()
    Ledger(run).path.write_bytes(whole + b'{"not": 1}\n[2]\n{"time": "20')
    assert standings([run], tmp_path)[0].state == "RUNNING"
    Ledger(run).path.write_bytes(whole[:20])
    assert standings([run], tmp_path)[0].state == "LOST"
    (run / FOLDER / "spec.json").write_text("{")
    (row,) = standings([run], tmp_path)
    assert row.state == "UNKNOWN" and f"{run / FOLDER / 'spec.json'} cannot be read" in row.note


def test_a_study_stands_for_its_runs(run, tmp_path):
    assert find_runs("study", tmp_path) == [run] == find_runs("study/arm-s1", tmp_path)


@pytest.mark.parametrize("accounting", [True, False])
def test_slurm_is_asked_with_and_without_accounting(tmp_path, monkeypatch, accounting):
    squeue = "12_1|RUNNING|None\n12_2|PENDING|JobArrayTaskLimit\n99|RUNNING|None\n"
    sacct = "11|CANCELLED by 0|None\n10|COMPLETED|\n"
    for name, text in (("squeue", squeue), ("sacct", sacct)):
        body = f"cat <<'E'\n{text}E\n" if name == "squeue" or accounting else "exit 1\n"
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    known = {"12_1": ("RUNNING", "None"), "12_2": ("PENDING", "JobArrayTaskLimit")}
    ended = {"11": ("CANCELLED", "None"), "10": ("COMPLETED", "")} if accounting else {}
    events = [{"event": "submitted", "job": job, "by": "u"} for job in ("12_1", "12_2", "11", "10")]
    assert status.job_states(events) == known | ended
