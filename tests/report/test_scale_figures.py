"""What a study's page says of scale: means, standard errors, gains and histograms that can be checked by hand."""

from __future__ import annotations

import csv
import io
import math
import shutil
import subprocess
import sys

import pytest

from loopscale.diagnostics.norms import NormSpread
from loopscale.diagnostics.scale import CLAMPS, Sight
from loopscale.evaluate.scale import Scale
from loopscale.report import study_scale as scale
from loopscale.report.panel import Panel
from loopscale.report.study import read_study
from loopscale.report.study_figures import panels
from loopscale.report.study_page import page
from tests.report import run_folder, study_folder
from tests.report.study_folder import SEEDS, diagnosis
from tests.report.test_page import CHECK, Page
from tests.report.test_study import rows

NORMS = {"blind": (300.0, 400.0, 500.0), "raw": (20.0, 20.0, 20.0)}
RADIAL = {"blind": (0.0, 2e-8, 4e-8), "raw": (0.03, 0.04, 0.05)}
"""Of the last loop."""
PERPLEXITIES = {"blind": {1: (80, 82, 84), 3: (80, 80, 80)}, "raw": {1: (90, 93, 96), 3: (60, 62, 64)}}
BINS = {"blind": ({33: 5, 34: 2}, {34: 3, 36: 1}, {35: 9}), "raw": ({17: 4},) * 3}
"""Tokens by quarter octave, of each seed."""


def records(arm: str, seed: int) -> list[dict]:
    """Diagnosed at two steps; the norm began at 100."""
    index = SEEDS.index(seed)
    clamp = {"rms": 0.01 * seed} | ({"radial": -0.002} if arm == "blind" else {})
    radial = [0.0, 0.5, RADIAL[arm][index]]
    found = [
        run_folder.record(50, 5.0, scale=diagnosis(100.0, {20: 1}, [0.5] * 3)),
        run_folder.record(90, 4.5, scale=diagnosis(NORMS[arm][index], BINS[arm][index], radial, clamp=clamp)),
        run_folder.record(100, 4.4),
    ]
    found[-1]["validation"] = {str(depth): math.log(values[index]) for depth, values in PERPLEXITIES[arm].items()}
    return found


@pytest.fixture
def study(tmp_path):
    for arm in NORMS:
        for seed in SEEDS:
            study_folder.write_run(tmp_path, arm, seed, records(arm, seed))
    return study_folder.study_file(tmp_path, {arm: ["depth.prior=fixed"] for arm in NORMS})


def shown(study) -> dict[str, Panel]:
    return {each.key: each for each in panels(read_study(study))}


def table(panel: Panel) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(panel.csv())))


def test_fixed_depths_have_no_law_and_every_other_figure_its_finding(study):
    assert {key: panel.title for key, panel in shown(study).items()} == {
        "perplexity": "At depth 3 raw has the lowest perplexity, 62.0 ± 1.2, against 80 ± 0 of blind"
        " (raw - blind: -0.255 ± 0.019 nats, paired by seed)",
        "held_out": "Held-out loss ends between 4.127 nats (raw) and 4.382 (blind) after 100 steps",
        "gain": "Loops after the first lower perplexity most in raw, by 31.00 ± 0.58 (1.50×), and least in blind, by 2.0 ± 1.2"
        " (1.03×)",
        "state_scale": "From step 50 to 100 the state keeps its scale in all arms",
        "final_norm": "blind's states end largest, with a norm of 400 ± 58: 20.0× that of raw's, the smallest, 20 ± 0",
        "token_norms": "In all arms the 99th percentile of tokens' norms is about 2.50× the median",
        "radial": "Of the gradient of the last loop's loss 4.0e-02 is radial in raw, 2.0e-08 in blind, which is blind to the"
        " state's scale",
        "clamp": "Clamping the state's scale changes the loss most in blind: +0.0200 ± 0.0058 nats with states held at the RMS of"
        " loop 1",
    }
    assert "Law at the end" not in page(read_study(study))


def test_the_norm_is_that_of_the_last_diagnosis_over_seeds(study):
    panel = shown(study)["final_norm"]
    mean, seeds, *_ = panel.figure.data
    assert (mean.x, mean.y, mean.meta, mean.marker.symbol) == ((0,), (400.0,), "arm-1", "circle")
    assert mean.error_y.array == (57.7,)  # 100 / √3
    assert (seeds.y, seeds.customdata) == ((300.0, 400.0, 500.0), SEEDS)
    assert panel.figure.layout.yaxis.type == "log" and list(panel.figure.layout.xaxis.ticktext) == ["blind", "raw"]
    assert table(panel)[0] == {
        "arm": "blind", "norm": "400.0", "standard_error": "57.7", "seeds": "3",
        "seed_1": "300.0", "seed_2": "400.0", "seed_3": "500.0",
    }  # fmt: skip
    assert panel.note.startswith("At depth 3, by the last diagnosis, step 90, of 4 to 9 held-out tokens a run;")


def test_the_gain_is_a_difference_of_perplexities_and_a_ratio(study):
    blind, raw = table(shown(study)["gain"])
    assert (blind["gain"], blind["standard_error"], blind["depth"]) == ("2.0", "1.15", "3")  # 0, 2, 4: 2 / √3
    assert float(raw["ratio"]) == pytest.approx(1.5) and float(raw["gain"]) == 31  # 30, 31, 32


def test_radial_fractions_by_loop_have_a_floor(study):
    panel = shown(study)["radial"]
    blind = panel.figure.data[0]
    assert list(blind.x) == [1, 2, 3] and list(blind.y) == [1e-12, 0.5, pytest.approx(2e-8, rel=1e-4)]
    assert panel.figure.layout.yaxis.type == "log"
    assert f"random directions {math.sqrt(2 / (math.pi * 32)):.2g} at width 32" in panel.note


def test_a_clamp_that_an_arm_does_not_know_is_left_out(study):
    found = [(row["clamp"], row["arm"], float(row["change"])) for row in table(shown(study)["clamp"])]
    assert found == [("rms", "blind", 0.02), ("rms", "raw", 0.02), ("radial", "blind", -0.002)]


def test_histograms_of_the_seeds_add_up_bin_by_bin(study):
    panel = shown(study)["token_norms"]
    told = table(panel)
    assert [(row["arm"], int(row["tokens"]), float(row["share"])) for row in told] == [
        ("blind", 5, 0.25), ("blind", 5, 0.25), ("blind", 9, 0.45), ("blind", 1, 0.05), ("raw", 12, 1.0),
    ]  # fmt: skip
    assert (float(told[0]["norm_from"]), float(told[3]["norm_to"])) == pytest.approx((2**8.25, 2**9.25), rel=1e-5)
    raw = panel.figure.data[1]
    assert list(raw.y) == [0, 1, 0] and list(raw.x) == pytest.approx([2 ** (n / 4) for n in (16.5, 17.5, 18.5)], rel=1e-4)
    assert panel.figure.layout.xaxis.type == "log"


def test_the_table_of_results(study):
    assert rows(page(read_study(study)), "Scale of the state") == [
        ["blind", "3", "400 ± 58", "4.00 ± 0.58", "2.5 ± 0", "2e-08 ± 1.2e-08", "+0.0200 ± 0.0058", "-0.002 ± 0",
         "+2.0 ± 1.2", "1.025 ± 0.014"],
        ["raw", "3", "20 ± 0", "0.2 ± 0", "2.5 ± 0", "0.0400 ± 0.0058", "+0.0200 ± 0.0058", "–", "+31.00 ± 0.58",
         "1.5 ± 0"],
    ]  # fmt: skip


def test_values_are_read_out_of_what_a_diagnosis_writes():
    counts = [[6, 0], [6, 0], [2, 4]]
    spread = NormSpread([1.0, 2.0, 9.0], [1.0, 2.0, 8.0], [1.0, 2.0, 12.0], [12.0] * 3, [0.0] * 3, [4.0, 8.0, 16.0], counts)
    sight = Sight([1e-8, 2e-8, 3e-8], [None, None, None], {1.0: 4.0}, 0.5)
    told = Scale(3, spread, sight, 4.5, 4.0, {"rms": 4.25, "radial": 3.5}).as_json()
    assert (scale.norm(told), scale.tail(told), scale.tokens_seen(told)) == (9.0, 1.5, 6)
    assert [scale.radial_fraction(2)(told), scale.last_radial_fraction(told)] == [2e-8, 3e-8]
    assert [scale.clamp_change(kind)(told) for kind in CLAMPS] == [0.25, -0.5]


def test_without_diagnoses_there_are_neither_figures_nor_a_table(tmp_path):
    found = shown(study_folder.whole(tmp_path))
    assert not {"final_norm", "token_norms", "radial", "clamp", "frontier"} & found.keys()
    assert "Scale of the state" not in page(read_study(tmp_path / "prior.yaml"))


def test_a_diagnosis_that_lacks_what_it_could_not_know(tmp_path):
    """No gradients of exits, no clamps, and no finite norm at the last loop."""
    short = diagnosis(1.0, {1: 3}, None)
    for name in ("mean", "median", "p99", "counts"):
        short["norms"][name] = short["norms"][name][:2]
    for arm, told in (("gone", short), ("dead", diagnosis(math.nan, {1: 3}, [math.nan] * 3))):
        study_folder.write_run(tmp_path, arm, 1, [run_folder.record(100, 4.0, scale=told)])
    found = read_study(study_folder.study_file(tmp_path, {"gone": [], "dead": []}, (1,)))
    assert Page(page(found)).open == []
    assert {"final_norm", "radial", "clamp", "gain"}.isdisjoint(each.key for each in panels(found))


ODD = [{}, {"depth": None}, {"depth": 10**9}, {"norms": {}}, {"norms": None}, {"radial_fraction": ["x"]}, {"clamp": {"rms": "1"}}]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_diagnosis_that_is_made_of_something_else_is_left_out(tmp_path, odd):
    told = {} if not odd else diagnosis(2.0, {1: 3}, [0.1, 0.1, 0.1]) | odd
    study_folder.write_run(tmp_path, "odd", 1, [run_folder.record(100, 4.0, scale=told)])
    found = read_study(study_folder.study_file(tmp_path, {"odd": []}, (1,)))
    assert scale.diagnoses(found.finished[0]) == {} and Page(page(found)).open == []


def test_an_arm_whose_first_exit_is_not_trained_does_not_flatten_the_others(study, tmp_path):
    for seed in SEEDS:
        told = records("raw", seed)
        told[-1]["validation"] = {"1": math.log(900), "3": math.log(60)}
        study_folder.write_run(tmp_path, "raw", seed, told)
    panel = shown(study)["gain"]
    assert panel.note.endswith("Off the scale: raw +840 ± 0.") and panel.figure.layout.yaxis.range[1] < 5
    assert [float(row["gain"]) for row in table(panel)] == pytest.approx([2.0, 840])


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
def test_a_browser_draws_all_figures_and_has_nothing_to_say(study, tmp_path):
    for arm in NORMS:
        study_folder.write_exits(tmp_path / "runs" / "prior" / f"{arm}-s1", study_folder.exits(4.0, 900.0))
    (tmp_path / "page.html").write_text(page(read_study(study)), encoding="utf-8")
    command = [sys.executable, CHECK, tmp_path / "page.html", "--figures", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "9 of 9 figures drawn, 0 console messages\n"), done.stdout + done.stderr
