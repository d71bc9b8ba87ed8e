"""On a real SLURM of two nodes, without accounting: a run is preempted, queued again, and ends as if nothing had been."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT, CannotRun, Cluster, Launched, why_not
from tests.conftest import Runs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # for munge
    try:
        with Cluster(folder, nodes=2).running() as up:
            yield up
    except CannotRun as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_preempted_run_goes_on_with_its_code_and_ends_with_the_undisturbed_losses(cluster, tmp_path, text_corpus, runs: Runs):
    steps = "train.steps=300"
    code = tmp_path / "code"
    shutil.copytree(ROOT / "loopscale", code / "loopscale", ignore=shutil.ignore_patterns("__pycache__"))
    launched = Launched(tmp_path, text_corpus, "taken")
    assert launched.submit(steps, nodes=2, devices=1, code=code).startswith("submitted job ")
    (code / "loopscale/train/run.py").write_text("raise SystemExit('edited since')\n")
    assert launched.standing().state in ("PENDING", "RUNNING")
    launched.wait_for_step(20)
    assert (launched.standing().state, launched.standing().restarts) == ("RUNNING", 0)

    cluster.preempt()
    launched.wait(lambda: launched.ledger.events()[-1]["event"] == "interrupted")
    standing = launched.standing()
    assert standing.state == "PENDING" and standing.note.endswith(", queued again") and standing.restarts == 0

    launched.wait_for_state("COMPLETED")
    standing = launched.standing()
    assert (standing.step, standing.restarts, standing.left) == (300, 1, None)
    told = [event["event"] for event in launched.ledger.events()]
    assert told == ["submitted", "started", "interrupted", "started", "finished"]
    runs.train("undisturbed", steps)
    found, expected = ([(r["step"], r["loss"]) for r in of] for of in (launched.records(), runs.records("undisturbed")))
    assert [step for step, _ in found] == list(range(1, 301))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-3)


def test_a_job_that_cannot_start_says_why_and_a_cancelled_one_stays_down(cluster, tmp_path, text_corpus):
    wrong = Launched(tmp_path, text_corpus, "wrong")
    wrong.submit(nodes=2, devices=1, cluster=["setup=[module load cuda/99]"])
    waited = wrong.wait_for_state("FAILED")
    assert wrong.standing().note == "setup failed: module load cuda/99; `loopscale launch requeue wrong` goes on"
    assert waited < 60

    gone = Launched(tmp_path, text_corpus, "gone")
    gone.submit("train.steps=5000", nodes=1, devices=1)
    gone.wait_for_step(3)
    assert gone.command("cancel", "gone").startswith("cancelled ")
    gone.wait_for_state("CANCELLED")
    gone.wait(lambda: not gone.command("status", "gone").count("RUNNING"))
    assert [event["event"] for event in gone.ledger.events()].count("started") == 1
