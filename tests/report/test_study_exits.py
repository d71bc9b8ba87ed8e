"""The frontier of a study and its table: means over seeds, what is off the scale, what is left out."""

from __future__ import annotations

import csv
import io
import math

import pytest

from loopscale.report.panel import Panel
from loopscale.report.study import read_study
from loopscale.report.study_figures import panels
from loopscale.report.study_page import page
from tests.report import study_folder
from tests.report.test_page import Page
from tests.report.test_study import rows


def frontier(study) -> Panel | None:
    return next((each for each in panels(read_study(study)) if each.key == "frontier"), None)


def runs(folder) -> list:
    """Two seeds of each of two arms; the study's file comes last."""
    found = [study_folder.write_run(folder, arm, seed) for arm in ("fixed-3", "pln-3") for seed in (1, 2)]
    return [*found, study_folder.study_file(folder, {"fixed-3": ["depth.prior=fixed"], "pln-3": []}, (1, 2))]


def test_lines_are_depths_and_hollow_marks_are_rules_averaged_over_seeds(tmp_path):
    *made, study = runs(tmp_path)
    for run, loss, rate in zip(made, (math.log(60), math.log(62), math.log(80), math.log(80)), (600, 660, 600, 600), strict=True):
        study_folder.write_exits(run, study_folder.exits(loss, rate))
    shown = frontier(study)
    assert shown is not None
    fixed, margin, other, _ = shown.figure.data
    assert (fixed.name, fixed.meta, other.meta, margin.meta) == ("fixed-3", "arm-1", "arm-2", "arm-1")
    assert list(fixed.x) == [630, 315, 210] and fixed.marker.symbol == "circle"
    assert fixed.y[2] == 61 and fixed.y[0] == pytest.approx(61 * math.e, rel=1e-5)
    assert fixed.error_y.array[2] == 1  # of 60 and 62: √2 / √2
    assert (list(margin.x), list(margin.y), list(margin.text)) == ([315], [61], ["margin"])
    assert margin.marker.symbol == "circle-open" and margin.customdata == (2.0,)
    told = list(csv.DictReader(io.StringIO(shown.csv())))
    assert told[3] == {
        "arm": "fixed-3", "rule": "margin", "loops": "2.0", "perplexity": "61.0", "standard_error": "1.0",
        "tokens_per_second": "315.0", "seeds": "2",
    }  # fmt: skip
    assert shown.title == (
        "The lowest perplexity is 61.0, of fixed-3 at depth 3;"
        " within 1.01× of it the fastest is fixed-3 by margin, 1.50× as fast at 61.0"
    )
    assert "On validation split of data/sotu, checkpoint step-100, 8 sequences, batches of 16, fp32." in shown.note
    # 80 e, more than 1.5 × 80.
    assert shown.note.endswith("Off the scale: fixed-3 at depth 1 (166), pln-3 at depth 1 (217), pln-3 at depth 2 (132).")
    assert 10 ** shown.figure.layout.yaxis.range[1] == pytest.approx(61 * math.sqrt(math.e), rel=0.03)
    assert rows(page(read_study(study)), "Early exits") == [
        ["fixed-3", "margin", "2", "2 ± 0", "61.0 ± 1.0", "315 ± 15", "25%, 50%, 25%"],
        ["pln-3", "margin", "2", "2 ± 0", "80 ± 0", "300 ± 0", "25%, 50%, 25%"],
    ]
    scale = rows(page(read_study(study)), "Scale of the state")
    assert [row[-1] for row in scale] == ["margin 2 ± 0"] * 2 and len(scale[0]) == 5


def test_seeds_without_a_rule_or_with_losses_that_are_not_finite_are_not_counted(tmp_path):
    first, second, *_, study = runs(tmp_path)
    gate = {"threshold": None, "loss": None, "tokens_per_second": 1.0, "mean_loops": 3.0}
    study_folder.write_exits(first, study_folder.exits(4.0, 600.0))
    study_folder.write_exits(second, study_folder.exits(math.nan, 600.0, rules={"gate": gate}))
    shown = frontier(study)
    assert shown is not None and "Mean over seeds (2 of 4 runs)" in shown.note
    assert [(row["rule"], row["seeds"]) for row in shown.rows] == [(None, 1), (None, 1), (None, 1), ("margin", 1)]


def test_a_file_that_cannot_be_read_is_told_beside_its_run_and_no_figure_is_made_of_it(tmp_path):
    first, *_, study = runs(tmp_path)
    (first / "evaluations" / "step-100-exits.json").write_text('{"created": ')
    assert frontier(study) is None
    text = page(read_study(study))
    assert Page(text).open == [] and "Early exits" not in text
    assert rows(text, "Runs")[0][-1] == "evaluations/step-100-exits.json cannot be read and is left out"
