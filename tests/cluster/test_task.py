"""What a task decides, and that it hears signals and passes them on: with a stand-in for `loopscale train` where that is the
point, which takes seconds to import."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loopscale.cluster.judge import Verdict
from loopscale.cluster.ledger import FOLDER, Attempt, Ledger
from loopscale.cluster.task import Child, Task, _Start
from loopscale.cluster.world import World
from loopscale.config import ClusterConfig

FIT = (0, json.dumps({"sick": {}, "refused": None}))


class Scripted(Child):
    """A child whose ends are given: (exit code, what it printed), and what it says last."""

    def __init__(self, *ends: tuple[int, str], says: str = "", asked: str | None = None):
        super().__init__(asked=asked)
        self._ends, self.ran = list(ends), []
        self.last.extend(says.splitlines())

    def run(self, module, environment, limit=None):
        self.ran.append((module, dict(environment)))
        return self._ends.pop(0)


def start(folder: Path, child: Child, rank: int = 0, nodes: int = 2, spares: int = 0, restart: int = 0, **content: object) -> int:
    """One start of rank ``rank``, one to a node."""
    names = tuple("abcd"[: nodes + spares])
    cluster = ClusterConfig.model_validate({"job": {"nodes": nodes, "spares": spares, "time": 10, "notice": 60}, **content})
    task = Task(str(folder), str(folder), ("c.yaml",), cluster.model_dump(mode="json"), "token")
    return _Start(task, cluster, World(names, 1, rank, 0, 29400), Attempt("7", "7", restart), child).run()


def told(folder: Path) -> list[tuple[str, str]]:
    return [(event["event"], event["message"]) for event in Ledger(folder).events()]


def saved(folder: Path, step: int) -> None:
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "saved", "step": step}) + "\n")


@pytest.mark.parametrize(
    ("code", "says", "event", "marked", "exit_code"),
    [
        (0, "", ("finished", ""), False, 0),
        (75, "asked to stop by SIGTERM", ("interrupted", "asked to stop by SIGTERM"), True, 75),
        (
            2,
            "c.yaml: 1 problem\n  model.heads  3 does not divide",
            ("failed", "c.yaml: 1 problem; model.heads 3 does not divide"),
            False,
            2,
        ),
        (1, "Traceback\nerror: rank 1 is gone", ("fault", "rank 1 is gone"), True, 1),
        (-9, "", ("fault", "its process was ended by SIGKILL and said nothing"), True, 137),
    ],
)
def test_how_training_ends_decides_whether_the_job_is_queued_again(tmp_path, code, says, event, marked, exit_code):
    assert start(tmp_path, Scripted(FIT, (code, ""), says=says)) == exit_code
    assert told(tmp_path) == [("started", ""), event]
    assert (tmp_path / FOLDER / "requeue-7-0").exists() == marked


def test_a_rank_beside_the_first_marks_too_but_tells_nothing(tmp_path):
    assert start(tmp_path, Scripted(FIT, (1, "")), rank=1) == 1
    assert (tmp_path / FOLDER / "requeue-7-0").exists() and not told(tmp_path)


def test_faults_without_a_new_checkpoint_are_retried_so_often_and_progress_counts_anew(tmp_path):
    ends = []
    for restart, step in enumerate([0, 0, 0, 40, 40, 40, 40]):
        if step:
            saved(tmp_path, step)
        start(tmp_path, Scripted(FIT, (1, ""), says="error: lost"), restart=restart, retries=2)
        ends.append(told(tmp_path)[-1][0])
    assert ends == ["fault", "fault", "failed", "fault", "fault", "failed", "failed"]
    assert told(tmp_path)[-1][1] == "lost (4 starts without a new checkpoint; retries is 2)"
    assert not (tmp_path / FOLDER / "requeue-7-2").exists()


def test_a_start_by_a_person_counts_anew(tmp_path):
    for restart in range(3):
        start(tmp_path, Scripted(FIT, (1, "")), restart=restart, retries=2)
    assert told(tmp_path)[-1][0] == "failed" and (tmp_path / FOLDER / "ended-7-2").exists()
    Ledger(tmp_path).write("requeued", "7")
    start(tmp_path, Scripted(FIT, (1, "")), restart=3, retries=2)
    assert told(tmp_path)[-1][0] == "fault"


def test_starts_that_are_killed_without_a_word_are_retried_so_often(tmp_path):
    class Killed(Scripted):
        def run(self, *_, **__):
            raise KeyboardInterrupt  # as if the task were gone: nothing is told

    for restart in range(4):
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, Killed(), restart=restart, retries=3)
    assert start(tmp_path, Scripted(), restart=4, retries=3) == 1
    assert told(tmp_path)[-1] == ("failed", "4 starts have ended without a word; retries is 3")
    assert (tmp_path / FOLDER / "ended-7-4").exists()


def test_one_whose_time_is_up_is_queued_again_however_often(tmp_path):
    for restart in range(12):
        assert start(tmp_path, Scripted(FIT, (75, "")), restart=restart, retries=0) == 75
        assert (tmp_path / FOLDER / f"requeue-7-{restart}").exists()


@pytest.mark.parametrize(("own", "limit"), [(None, 590), (300.0, 300), (3600.0, 590)])
def test_a_run_watches_the_jobs_time_less_what_ending_takes_or_its_own_limit(tmp_path, own, limit):
    cluster = ClusterConfig.model_validate({"job": {"time": 10}})
    task = Task(str(tmp_path), str(tmp_path), ("c.yaml", "--resume", "auto"), cluster.model_dump(), "token", own)
    child = Scripted(FIT, (0, ""))
    _Start(task, cluster, World(("a",), 1, 0, 0, 29400), Attempt("7", "7", 0), child).run()
    assert child.ran[1][0] == ["loopscale", "train", "c.yaml", "--resume", "auto", f"train.max_time={limit}"]


def test_a_refusal_starts_nothing_and_is_told(tmp_path):
    refused = "1 of 2 nodes are fit, 2 needed; b: /dev/shm has 0.06 GB free, preflight.shm asks for 1"
    child = Scripted((0, json.dumps({"sick": {"b": ["x"]}, "refused": refused})))
    assert start(tmp_path, child) == 1
    assert told(tmp_path) == [("started", ""), ("refused", refused)] and len(child.ran) == 1
    assert not (tmp_path / FOLDER / "requeue-7-0").exists()


def test_a_preflight_that_dies_leaves_its_reason_for_the_first_rank(tmp_path):
    child = Scripted((1, ""), says="Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'")
    assert start(tmp_path, child, rank=1) == 1
    assert (tmp_path / FOLDER / "ends/7.0.1").read_text() == "ModuleNotFoundError: No module named 'torch'"


def test_a_spare_takes_a_sick_nodes_place_and_the_first_fit_node_tells(tmp_path):
    verdict = (0, "a library's line\n" + json.dumps({"sick": {"a": ["its clock is late"]}, "refused": None}))
    environments = []
    for rank in range(3):
        child = Scripted(verdict, (0, ""))
        assert start(tmp_path, child, rank=rank, spares=1) == 0
        environments.append({k: v for k, v in child.ran[-1][1].items() if k in ("RANK", "MASTER_ADDR", "WORLD_SIZE")})
    assert environments[0]["WORLD_SIZE"] == "3"  # of its preflight: it did not train
    assert environments[1:] == [{"RANK": r, "MASTER_ADDR": "b", "WORLD_SIZE": "2"} for r in "01"]
    assert told(tmp_path) == [("started", ""), ("excluded", "a: its clock is late"), ("finished", "")]


def test_a_signal_before_training_queues_again_and_starts_nothing(tmp_path):
    assert start(tmp_path, Scripted((75, ""), asked="SIGUSR2")) == 75
    assert told(tmp_path)[-1] == ("interrupted", "asked to stop by SIGUSR2 before training")


PARENT = """
import signal, sys
from loopscale.cluster.task import Child
child = Child()
child.listen()
print("armed", flush=True)
code, printed = child.run(["child"], {"X": "1"}, limit=60)
print(code, printed.strip(), child.asked, child.reason(code), flush=True)
"""
CHILD = """
import os, signal, sys, time
def heard(number, _):
    print(signal.Signals(number).name + os.environ["X"], flush=True)
    print("error: saved", file=sys.stderr)
    sys.exit(75)
signal.signal(signal.SIGUSR2, heard)
signal.signal(signal.SIGTERM, heard)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_parent_reaches_the_process_that_trains(tmp_path, number):
    (tmp_path / "child.py").write_text(CHILD)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"},
    )  # fmt: skip
    assert parent.stdout.readline() == "armed\n"
    assert parent.stderr.readline() == "ready\n"
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=60)
    assert out == f"75 {number.name}1 {number.name} saved\n"


def test_a_process_that_hangs_is_ended_when_its_time_is_up(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    child = Child()
    assert child.run(["hangs"], {"PYTHONPATH": str(tmp_path)}, limit=2) == (-signal.SIGKILL, "begun\n")
    assert child.reason(-signal.SIGKILL) == "its process was ended by SIGKILL and said nothing"


def test_training_that_a_signal_ends_before_it_can_answer_was_interrupted(tmp_path):
    class Deaf(Scripted):
        def run(self, module, environment, limit=None):
            ended = super().run(module, environment, limit)
            self.asked = "SIGTERM" if module[1:2] == ["train"] else None
            return ended

    assert start(tmp_path, Deaf(FIT, (-signal.SIGTERM, ""))) == 75
    assert told(tmp_path)[-1][0] == "interrupted" and (tmp_path / FOLDER / "requeue-7-0").exists()


def test_a_verdict_survives_its_way_between_processes():
    verdict = Verdict({"b": ["slow", "late"]}, "1 of 2 nodes are fit")
    assert Verdict(**json.loads(json.dumps({"sick": dict(verdict.sick), "refused": verdict.refused}))) == verdict
