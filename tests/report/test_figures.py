"""What the figures draw, and that their CSV holds the same."""

from __future__ import annotations

import csv
import io
import math

import pytest

from loopscale.report import figures
from loopscale.report.run import read_run
from tests.report import run_folder


def parsed(panel: figures.Panel) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(panel.csv())))


def trace(panel: figures.Panel, name: str):
    return next(each for each in panel.figure.data if each.name == name)


def test_loss_shows_gaps_validation_and_references(tmp_path):
    panel = figures.loss(read_run(run_folder.whole(tmp_path)))
    assert panel.title == (
        "Training loss falls from 8.00 to 4.61 nats in 30 steps; validation at depth 5 ends at 4.55, between unigram and bigram"
    )
    assert list(trace(panel, "training").y) == [8.0, None, 4.61]
    assert dict(zip(trace(panel, "validation, depth 5").x, trace(panel, "validation, depth 5").y, strict=True)) == {
        20: 5.5,
        30: 4.55,
    }
    assert trace(panel, "bigram").y[0] == math.log(63)
    assert parsed(panel) == [
        {"step": "10", "training_loss": "8.0", "validation_loss_depth_1": "", "validation_loss_depth_5": ""},
        {"step": "20", "training_loss": "", "validation_loss_depth_1": "6.0", "validation_loss_depth_5": "5.5"},
        {"step": "30", "training_loss": "4.61", "validation_loss_depth_1": "5.2", "validation_loss_depth_5": "4.55"},
    ]
    assert panel.figure.layout.yaxis.title.text == "loss (nats per token)"


def test_perplexity_is_that_of_the_newest_evaluation(tmp_path):
    old = run_folder.evaluation((300.0, 200.0), created="2026-11-29T00:00:00+00:00")
    tasks = {"created": "2026-12-24T00:00:00+00:00", "tasks": {}}
    folder = run_folder.write(tmp_path, [run_folder.record(10, 8.0)], evaluations=[run_folder.evaluation(), old, tasks])
    panel = figures.perplexity(read_run(folder))
    assert panel.title == "Perplexity falls from 231 at depth 1 to 94.3 at depth 5 and is flat to depth 10"
    assert tuple(trace(panel, "perplexity").y) == run_folder.PERPLEXITIES
    assert [float(row["perplexity"]) for row in parsed(panel)] == list(run_folder.PERPLEXITIES)
    assert panel.note.startswith("validation split of data/sotu, checkpoint step-30, 64 sequences of 128 tokens, own KV")
    assert trace(panel, "unigram").text[1] == "unigram 571"  # above where the curve ends: labelled there
    assert trace(panel, "bigram").text[0] == "bigram 63.0"
    assert panel.figure.layout.yaxis.type == "log"


def test_depths_against_the_prior(tmp_path):
    panel = figures.depths(read_run(run_folder.whole(tmp_path)))
    assert panel.title == "The 12 logged depths average 5.0, in line with the prior's mean of 5.0"
    assert list(trace(panel, "drawn").y) == [0, 0, 0.25, 0.25, 0, 0.25, 0.25]
    assert list(trace(panel, "prior pln").y) == [0.0, 0.1, 0.2, 0.1, 0.1, 0.2, 0.3]
    assert parsed(panel)[2] == {"depth": "3", "draws": "3", "share": "0.25", "prior": "0.2"}


def test_a_long_tail_is_cut_where_nothing_is_drawn(tmp_path):
    pmf = [0.5, 0.4999, *[0.0001 / 62] * 62]
    folder = run_folder.write(
        tmp_path, [run_folder.record(10, 8.0, depths=[1, 4])], manifest=run_folder.manifest(prior={"pmf": pmf, "mean": 1.5})
    )
    assert [row["depth"] for row in figures.depths(read_run(folder)).rows] == [1, 2, 3, 4]


def test_state_norm_is_an_rms_early_midway_and_late(tmp_path):
    panel = figures.state_norm(read_run(run_folder.whole(tmp_path)))
    assert panel.title == "Over 3 loops at step 30 the state keeps its scale, and is 0.51× as large as at step 10"
    assert [each.name for each in panel.figure.data if each.showlegend] == ["step 10", "step 20", "step 30"]
    assert list(trace(panel, "step 10").y) == [1.0, 1.5, 2.0]  # L2 norms 8, 12, 16 over sqrt(64)
    assert list(trace(panel, "step 30 p99").y) == [10.0 / 8, 10.1 / 8, 10.2 / 8]
    assert parsed(panel)[0] == {"step": "10", "loop": "1", "mean": "1.0", "p99": "1.25"}
    assert panel.figure.layout.yaxis.title.text == "RMS of a token's state"


def test_a_single_record_is_drawn_as_points(tmp_path):
    drawn = figures.panels(read_run(run_folder.write(tmp_path, [run_folder.record(10, 8.0)])))
    assert trace(drawn[0], "training").mode == "markers"
    assert drawn[1].figure is None and "loopscale eval" in drawn[1].note
    assert drawn[3].figure.layout.yaxis.title.text == "L2 norm of a token's state"  # no config: the width is unknown


def test_nothing_logged_yet(tmp_path):
    drawn = figures.panels(read_run(run_folder.write(tmp_path, [])))
    assert [panel.figure for panel in drawn] == [None] * 4
    assert all(panel.title and panel.note for panel in drawn)


def test_values_that_are_not_finite_are_gaps(tmp_path):
    records = [
        run_folder.record(10, math.nan, state_norm=[math.nan], depths=None, validation={"5": math.nan}),
        run_folder.record(20, math.inf, state_norm=[None, 8.0], state_norm_p99=[]),
    ]
    bad = run_folder.evaluation((math.inf, 100.0), loss=[math.inf, math.log(100)], baselines={"unigram": math.nan})
    drawn = figures.panels(read_run(run_folder.write(tmp_path, records, evaluations=[bad])))
    assert drawn[0].title == "No finite loss has been logged" and drawn[0].figure is None
    assert drawn[1].title == "Perplexity is 100 at depth 2, the only depth evaluated"
    assert "nan" not in "".join(panel.csv() for panel in drawn) and "inf" not in "".join(panel.csv() for panel in drawn)


def test_a_law_that_moved_is_shown_by_its_mean_over_the_run_and_as_it_ended(tmp_path):
    """A record has the law of the step after it, so the last is that of no draw."""
    laws = [[0.4, 0.6], [0.2, 0.8], [0.0, 0.5, 0.5]]
    records = [
        run_folder.record(10 * n, 8.0, depths=[1, 2], prior={"mean": 1.5, "entropy": 0.7, "probabilities": law})
        for n, law in enumerate(laws, 1)
    ]
    manifest = run_folder.manifest(prior={"name": "learned", "pmf": [0.6, 0.4], "mean": 1.4})
    panel = figures.depths(read_run(run_folder.write(tmp_path, records, manifest=manifest)))
    assert [row["prior"] for row in panel.rows] == pytest.approx([0.4, 0.6, 0.0])
    assert [row["prior_at_end"] for row in panel.rows] == [0.0, 0.5, 0.5]
    assert [trace.name for trace in panel.figure.data] == [
        "drawn",
        "prior learned, mean over the run",
        "prior learned at the end",
    ]
    assert panel.title == "The 6 logged depths average 1.5, in line with the prior's mean of 1.6"
