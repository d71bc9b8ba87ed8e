"""`loopscale train --study`: real runs, a few at once; what is missing is trained, whatever stopped it."""

from __future__ import annotations

import fcntl
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from loopscale.cluster.local_study import Room, check_same, describe
from loopscale.config.study import load_study
from loopscale.errors import UsageError
from tests.conftest import TINY, Runs
from tests.launch import execute
from tests.train.jobs import Job

ARMS = [{"name": "low", "set": ["optimizer.lr=1e-3"]}, {"name": "high", "set": ["optimizer.lr=3e-3"]}]


@pytest.fixture
def study(runs: Runs) -> Path:
    """Two arms, a seed each."""
    (runs.folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    path = runs.folder / "rates.yaml"
    own = [f"corpus.path={runs.corpus}", f"run.folder={runs.folder / 'runs'}"]
    path.write_text(yaml.safe_dump({"config": "tiny.yaml", "set": own, "arms": ARMS}))
    return path


def training(runs: Runs, study: Path, *overrides: str) -> Job:
    command = [sys.executable, "-m", "loopscale", "train", "--study", str(study), *overrides, "--at-once", "2"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return runs.job("rates/low-s1", [command], start=execute, environment=environment)


@pytest.fixture(autouse=True)
def place(runs: Runs) -> None:
    (runs.folder / "rates").mkdir()  # of what the job prints


def steps(runs: Runs, name: str) -> list[int]:
    return [record["step"] for record in runs.records(f"rates/{name}")]


@pytest.mark.ranks
def test_what_is_missing_is_trained_and_what_is_finished_is_not_touched(runs, study):
    with training(runs, study) as job:
        assert job.wait_for_end() == [0], job.all_printed()
        lines = job.printed(0).splitlines()
    assert lines[0] == f"rates: 2 of 2 runs to train, 2 at once, in {runs.folder / 'runs/rates'}"
    assert [line.split(" after")[0] for line in lines[1:3]] == ["started  low-s1", "started  high-s1"]
    assert {line.split(" after")[0] for line in lines[3:]} == {"finished low-s1", "finished high-s1"}
    runs.train("by-hand", "optimizer.lr=1e-3", "run.seed=1")
    assert [r["loss"] for r in runs.records("rates/low-s1")] == [r["loss"] for r in runs.records("by-hand")]
    before = (runs.path("rates/low-s1") / "metrics.jsonl").stat().st_mtime_ns
    (runs.path("rates/high-s1") / "journal.jsonl").unlink()  # as if it had been stopped behind its last checkpoint
    with training(runs, study) as job:
        assert job.wait_for_end() == [0], job.all_printed()
        assert job.printed(0).splitlines()[:2] == [lines[0].replace("2 of 2", "1 of 2"), "started  high-s1"]
    assert (runs.path("rates/low-s1") / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.ranks
def test_ctrl_c_saves_all_that_run_and_the_same_command_goes_on(runs, study):
    with training(runs, study, "train.steps=200", "checkpoint.every=0") as job:
        job.wait_for_steps(3)
        below = psutil.Process(job.ranks[0].pid).children(recursive=True)
        job.ranks[0].send_signal(signal.SIGINT)
        assert job.wait_for_end() == [75], job.all_printed()
        assert not psutil.wait_procs(below, timeout=10)[1]
        assert job.last_line(0) == "stopped; the same command goes on"
    assert 3 <= len(steps(runs, "low-s1")) < 200
    with training(runs, study, "train.steps=200", "checkpoint.every=0") as job:
        assert job.wait_for_end() == [0], job.all_printed()
    for name in ("low-s1", "high-s1"):
        assert steps(runs, name) == list(range(1, 201))


@pytest.mark.ranks
def test_a_run_that_fails_is_told_and_the_others_go_on(runs, study):
    content = yaml.safe_load(study.read_text())
    content["arms"].insert(0, {"name": "broken", "set": ["corpus.path=nowhere"]})
    study.write_text(yaml.safe_dump(content))
    with training(runs, study) as job:
        assert job.wait_for_end() == [1], job.all_printed()
        printed = job.printed(0)
    log = runs.folder / "runs/rates/logs/broken-s1.log"
    (failed,) = (line for line in printed.splitlines() if line.startswith("failed"))
    assert "nowhere" in failed and f"(log: {log})" in failed
    assert job.last_line(0) == "1 of 3 runs failed: broken-s1; the same command tries them again"
    assert steps(runs, "low-s1") == steps(runs, "high-s1") == list(range(1, 21))


@pytest.mark.ranks
def test_a_run_that_another_process_trains_is_waited_for(runs, study):
    """A run that outlived its killed command, or one of the same command on another machine."""
    taken = runs.path("rates/low-s1")
    taken.mkdir(parents=True)
    with (taken / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with training(runs, study) as job:
            job.wait(lambda: "finished high-s1" in job.printed(0), 150)
            assert "low-s1" not in job.printed(0)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert job.wait_for_end() == [0], job.all_printed()
    assert steps(runs, "low-s1") == list(range(1, 21))


@pytest.mark.parametrize(
    ("overrides", "cores", "gpus", "at_once", "expected"),
    [
        ((), 2, 0, None, Room(2, 1)),  # TINY asks for one thread
        ((), 16, 0, None, Room(16, 1)),
        ((), 16, 0, 3, Room(3, 5)),
        ((), 1, 0, 4, Room(4, 1)),
        (("train.threads=4",), 16, 0, None, Room(4, 4)),
        (("parallel.tensor=2",), 16, 0, None, Room(8, 1)),
        (("parallel.tensor=2", "parallel.pipeline=2"), 2, 0, None, Room(1, 1)),
        ((), 16, 8, None, Room(8, 2, tuple((n,) for n in range(8)))),
        (("parallel.tensor=2",), 16, 8, None, Room(4, 2, ((0, 1), (2, 3), (4, 5), (6, 7)))),
        (("parallel.tensor=2",), 16, 8, 2, Room(2, 4, ((0, 1), (2, 3)))),
    ],
)
def test_as_many_runs_at_once_as_there_is_room_for(study, overrides, cores, gpus, at_once, expected):
    assert Room.of(load_study(study, overrides), cores, gpus, at_once) == expected


def test_a_run_that_needs_more_gpus_than_there_are_is_refused(study):
    with pytest.raises(UsageError, match=r"a run of rates has 2 ranks, and this machine 1 GPU$"):
        Room.of(load_study(study, ["parallel.tensor=2"]), 16, 1)


def test_a_folder_with_a_run_of_another_configuration_is_refused(runs, study):
    found = load_study(study)
    folder = runs.path("rates/high-s1")
    folder.mkdir(parents=True)
    saved = load_study(study, ["model.vocab_size=500", "train.threads=2"]).runs[1].loaded.config
    (folder / "config.yaml").write_text(yaml.safe_dump(saved.model_dump(mode="json")))
    check_same(found)  # the vocabulary is the corpus's, threads change nothing
    other = saved.model_copy(update={"optimizer": saved.optimizer.model_copy(update={"lr": 0.5})})
    (folder / "config.yaml").write_text(yaml.safe_dump(other.model_dump(mode="json")))
    with pytest.raises(UsageError, match=r"high-s1 was trained with optimizer.lr 0.5, not 0.003: remove that folder"):
        check_same(found)


def test_a_dry_run_shows_how_the_runs_stand(runs, study):
    folder = runs.path("rates/low-s1")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 20}\n')
    (folder / "journal.jsonl").write_text('{"kind": "done", "step": 20}\n')
    other = runs.path("rates/high-s1")
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 7}\n')
    first, low, high = describe(load_study(study), Room(2, 1)).splitlines()
    assert first == "rates: 1 of 2 runs to train, 2 at once"
    assert low.split() == ["low-s1", "finished", "of", "20"] and high.split() == ["high-s1", "at", "step", "7", "of", "20"]


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_while_libraries_load_it_ends_as_one_that_goes_on_later(runs, study, number):
    with training(runs, study) as job:
        process = psutil.Process(job.ranks[0].pid)

        def listens() -> bool:
            caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
            return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))

        job.wait(listens, 60)
        job.ranks[0].send_signal(number)
        assert job.wait_for_end() == [75], job.all_printed()
        assert job.last_line(0) == "stopped; the same command goes on"
    assert not (runs.folder / "runs/rates").exists()


def test_a_damaged_configuration_of_a_run_is_told_with_its_remedy(runs, study):
    folder = runs.path("rates/high-s1")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    with pytest.raises(UsageError, match=r"high-s1/config.yaml cannot be read \(batch.global_batch .*put the one"):
        check_same(load_study(study))
