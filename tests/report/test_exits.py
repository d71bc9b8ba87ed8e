"""Evaluations of exits in a run's folder, whole or not."""

from __future__ import annotations

import json

import pytest

from loopscale.report.run import read_run
from tests.report import run_folder, study_folder


def test_that_of_the_newest_checkpoint_is_read(tmp_path):
    run = run_folder.write(tmp_path, [run_folder.record(100, 4.0)], evaluations=[run_folder.evaluation()])
    for checkpoint in ("step-90", "step-100", "best"):
        study_folder.write_exits(run, study_folder.exits(4.0, 900.0, checkpoint=checkpoint))
    read = read_run(run)
    assert read.exits is not None and read.exits.checkpoint == "step-100"
    assert [(point.depth, point.loss, point.tokens_per_second) for point in read.exits.fixed] == [
        (1, 5.0, 900.0), (2, 4.5, 450.0), (3, 4.0, 300.0)]  # fmt: skip
    assert read.exits.rules["margin"].exits == [0.25, 0.5, 0.25]
    assert read.evaluation == run_folder.evaluation() and read.unreadable == []


def test_values_that_are_not_finite_are_none(tmp_path):
    run = run_folder.write(tmp_path, [])
    rule = {"threshold": None, "loss": float("nan"), "tokens_per_second": 9.0, "mean_loops": 3.0}
    study_folder.write_exits(run, study_folder.exits(float("nan"), 900.0, rules={"gate": rule}))
    read = read_run(run)
    assert read.exits is not None and {point.loss for point in read.exits.fixed} == {None}
    assert read.exits.rules["gate"].loss is None and read.exits.rules["gate"].exits == []


ODD = {
    "below 0": study_folder.exits(-1.0, 900.0),
    "slower than standing": study_folder.exits(4.0, -5.0),
    "no end": study_folder.exits(4.0, 900.0, target="inf"),
    "no step": study_folder.exits(4.0, 900.0, checkpoint="step-" + "9" * 5000),
    "no depth": study_folder.exits(4.0, 900.0, depth=0),
    "a word": study_folder.exits(4.0, 900.0, fixed=[{"depth": "x"}]),
}
TEXTS = {"empty": "", "half": '{"created": ', "a list": "[]", "short": '{"depth": 3}', "deep": "[" * 100_000}


@pytest.mark.parametrize("text", [*TEXTS.values(), *map(json.dumps, ODD.values())], ids=[*TEXTS, *ODD])
def test_odd_and_half_written_files_are_left_out_and_told(tmp_path, text):
    run = run_folder.write(tmp_path, [])
    (run / "evaluations" / "step-9-exits.json").write_text(text)
    study_folder.write_exits(run, study_folder.exits(4.0, 900.0, checkpoint="step-5"))
    read = read_run(run)
    assert read.exits is not None and read.exits.checkpoint == "step-5"
    assert read.unreadable == ["evaluations/step-9-exits.json"]
