"""The page of a study: its numbers, what it leaves out, its size, and that a browser draws it."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml

from loopscale.cli import main
from loopscale.config.study import load_study
from loopscale.errors import UsageError
from loopscale.report import write_study_report
from loopscale.report.panel import Panel
from loopscale.report.study import read_study
from loopscale.report.study_figures import POINTS, TIMES, panels
from loopscale.report.study_page import left_out, page, summary
from tests.report import packed, run_folder, study_folder
from tests.report.study_folder import BEGIN, END, NATS, SEEDS, STEPS
from tests.report.test_page import CHECK, Page

LIMIT = 2_000_000
"""Bytes of a page."""


@pytest.fixture
def study(tmp_path):
    return study_folder.whole(tmp_path)


def panel(study, key: str) -> Panel:
    return next(each for each in panels(read_study(study)) if each.key == key)


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title that begins so."""
    body = text.split(f"<h2>{title}")[1].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall("<td>(.*?)</td>", row, re.DOTALL) for row in body.split("<tr>")[1:]]


def test_tables_are_means_and_standard_errors_over_seeds(study):
    text = page(read_study(study))
    perplexities = {arm: {depth: np.exp(values) for depth, values in by_depth.items()} for arm, by_depth in NATS.items()}
    assert rows(text, "Held-out perplexity at the end") == [
        [arm, "3", *(f"{np.mean(v):.1f} ± {np.std(v, ddof=1) / np.sqrt(3):.1f}" for v in by_depth.values())]
        for arm, by_depth in perplexities.items()
    ]
    assert rows(text, "Held-out perplexity at the end")[0] == ["fixed-3", "3", "164.6 ± 9.5", "60.5 ± 3.5"]
    assert rows(text, "Held-out loss at the end minus that of fixed-3, in nats") == [
        ["pln-3", "3", "-0.5 ± 0", "+0.1 ± 0"],
        ["learned", "3", "-0.4 ± 0", "-0.100 ± 0.012"],  # -0.1, -0.08, -0.12: 0.02 / √3
    ]
    assert rows(text, "Law at the end") == [
        ["fixed-3", "3", "3 ± 0", "0 ± 0", "p(3) = 1 ± 0"],
        ["pln-3", "3", "2.2 ± 0", "1.221 ± 0", "p(3) = 0.2 ± 0"],
        ["learned", "3", "2.7 ± 0", "1.089 ± 0", "p(3) = 0.6 ± 0"],
    ]
    assert rows(text, "What each arm changes") == [
        ["fixed-3", "depth.prior=fixed"],
        ["pln-3", "nothing"],
        ["learned", "depth.prior=learned\ndepth.entropy_coef=0.1"],
    ]
    assert rows(text, "Runs")[1] == ["pln-3-s1", "pln-3", "1", "finished", "204,800", "0:01:10", ""]
    assert ["version of torch", "2.14.1"] in rows(text, "Environment")


def test_the_sentence_says_what_was_compared_and_by_which_protocol(study):
    assert Page(summary(read_study(study))).text == (
        "prior compares 3 arms (fixed-3, pln-3, learned) with 3 seeds each (1, 2, 3): looped language models of 1.91M"
        " parameters, trained for 100 steps on 205k tokens of data/sotu. fixed-3 reaches perplexity 60.5 ± 3.5 at depth 3;"
        " pln-3 reaches perplexity 66.9 ± 3.9 at depth 3; learned reaches perplexity 54.7 ± 2.9 at depth 3 (exp of the"
        " held-out loss in nats per token after the last step, up to 4 sequences of 32 tokens, validated at depths 1, 3;"
        " ± standard error over seeds)."
    )


def test_every_figure_states_its_finding(study):
    assert {each.key: each.title for each in panels(read_study(study))} == {
        "perplexity": "At depth 3 learned has the lowest perplexity, 54.7 ± 2.9, against 60.5 ± 3.5 of fixed-3"
        " (learned - fixed-3: -0.100 ± 0.012 nats, paired by seed)",
        "held_out": "Held-out loss ends between 4.000 nats (learned) and 4.200 (pln-3) after 100 steps",
        "gain": "Loops after the first lower perplexity most in fixed-3, by 104.0 ± 6.0 (2.72×),"
        " and least in pln-3, by 32.9 ± 1.9 (1.49×)",
        "law-learned": "learned: the likeliest depth moves from 2 (p = 0.47) to 3 (p = 0.60)",
        "final_law": "pln-3's law ends broadest, with an entropy of 1.22 nats, fixed-3's narrowest, with 0.00",
        "law_mean": "The mean of the law rises most in learned, from 2.25 to 2.70",
        "law_entropy": "The entropy of the law falls most in learned, from 1.24 to 1.09",
        "state_scale": "From step 10 to 100 the state grows 2.00× in learned and keeps its scale in fixed-3",
    }


def test_the_heat_map_is_the_law_by_step_and_depth(study):
    shown = panel(study, "law-learned")
    (heat,) = shown.figure.data
    assert list(heat.x) == list(range(10, STEPS + 1, 10)) and list(heat.y) == [1, 2, 3, 4]
    z = np.array(heat.z)
    np.testing.assert_allclose(z[:, -1], END)
    np.testing.assert_allclose(z[:, 0], 0.9 * np.array(BEGIN) + 0.1 * np.array(END))
    assert heat.meta == "scale" and shown.figure.layout.xaxis.title.text == "optimizer step"
    first = next(csv.DictReader(io.StringIO(shown.csv())))
    assert first == {"step": "10", "p_1": "0.19", "p_2": "0.47", "p_3": "0.24", "p_4": "0.1"}


def test_curves_are_means_over_seeds_and_their_csv_says_so(study):
    shown = panel(study, "held_out")
    learned = next(trace for trace in shown.figure.data if trace.name == "learned")
    assert list(learned.x) == [50, 100] and list(learned.y) == [4.5, 4.0]
    assert learned.meta == "arm-3"
    error = np.std(NATS["learned"][3], ddof=1) / np.sqrt(3)
    assert list(csv.DictReader(io.StringIO(shown.csv())))[-1] == {
        "arm": "learned", "step": "100", "loss": "4.0", "standard_error": f"{error:.3g}", "seeds": "3",
    }  # fmt: skip
    scale = panel(study, "state_scale")
    learned = next(trace for trace in scale.figure.data if trace.name == "learned")
    assert (learned.y[0], learned.y[-1]) == (1.0, 2.0) and scale.figure.layout.yaxis.type == "log"
    bars = next(trace for trace in panel(study, "perplexity").figure.data if trace.name == "fixed-3").error_y.array
    fixed = [np.std(np.exp(values), ddof=1) / np.sqrt(3) for values in NATS["fixed-3"].values()]
    np.testing.assert_allclose(bars, fixed, rtol=0.005)


def test_unfinished_and_missing_runs_are_named_and_left_out(study, tmp_path, capsys):
    whole = page(read_study(study))
    study_folder.write_run(tmp_path, "learned", 2, study_folder.records("learned", 2, steps=50))
    study_folder.write_run(tmp_path, "pln-3", 1, [])
    shutil.rmtree(tmp_path / "runs" / "prior" / "pln-3-s2")
    assert main(["report", "--study", str(study)]) == 0
    said = (
        "Left out: 3 of 9 runs, which are not finished:"
        " pln-3-s1 (step 0 of 100), pln-3-s2 (missing), learned-s2 (step 50 of 100)."
    )
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path}/runs/prior/report.html\n" and printed.err == f"{said}\n"
    text = (tmp_path / "runs" / "prior" / "report.html").read_text(encoding="utf-8")
    assert Page(text).text.count(said) == 1
    assert ["learned-s2", "learned", "2", "step 50 of 100", "102,400", "0:00:35", "left out"] in rows(text, "Runs")
    assert ["pln-3-s2", "pln-3", "2", "missing", "", "", "left out"] in rows(text, "Runs")
    table = rows(text, "Held-out perplexity at the end")
    assert table[0] == rows(whole, "Held-out perplexity at the end")[0]
    assert table[1] == ["pln-3", "1", *(f"{math.exp(nats):.4g}" for nats in (4.7, 4.3))]
    # Of seeds 1 and 3, which both arms have: -0.1 and -0.12.
    assert rows(text, "Held-out loss at the end minus")[1] == ["learned", "2", "-0.4 ± 0", "-0.110 ± 0.010"]
    assert rows(text, "Held-out loss at the end minus")[0][1:] == ["1", *(f"{d}" for d in ("-0.5", "+0.1"))]


def test_the_first_arm_that_has_finished_is_the_reference(study, tmp_path):
    for seed in SEEDS:
        shutil.rmtree(tmp_path / "runs" / "prior" / f"fixed-3-s{seed}")
    found = read_study(study)
    assert rows(page(found), "Held-out loss at the end minus that of pln-3")[0][:2] == ["learned", "3"]
    # An arm keeps its colour when others are missing.
    assert [trace.meta for trace in panel(study, "perplexity").figure.data] == ["arm-2", "arm-3"]


def test_a_loss_that_is_not_finite_is_left_out_of_its_cell(study, tmp_path):
    told = study_folder.records("learned", 3)
    told[-1]["validation"]["3"] = math.nan
    study_folder.write_run(tmp_path, "learned", 3, told)
    text = page(read_study(study))
    assert rows(text, "Held-out perplexity at the end")[2][1:] == ["3", "110.3 ± 6.4", "52.6 ± 3.1 (2 seeds)"]
    assert "nan" not in packed.unpacked(text, "data").lower()


def test_records_without_a_law_and_a_study_of_one_run(tmp_path):
    told = [run_folder.record(50, 5.0), run_folder.record(STEPS, 4.0)]
    study_folder.write_run(tmp_path, "only", 4, told)
    found = read_study(study_folder.study_file(tmp_path, {"only": []}, (4, 5)))
    text = page(found)
    assert Page(text).open == []
    drawn = {each.key: each.figure is not None for each in panels(found)}
    assert drawn == dict.fromkeys(("perplexity", "held_out", "final_law", "law_mean", "law_entropy"), False) | {
        "state_scale": True
    }
    assert "minus that of" not in text and "Left out: 1 of 2 runs" in text


def test_a_study_without_a_finished_run_says_what_makes_them(tmp_path, capsys):
    study = study_folder.study_file(tmp_path)
    study_folder.write_run(tmp_path, "pln-3", 1, study_folder.records("pln-3", 1, steps=50))
    assert main(["report", "--study", str(study)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"no run of the study {study} has finished in {tmp_path}/runs/prior: `loopscale train --study {study}` makes them\n"
    )


def test_overrides_belong_to_the_study(study, tmp_path):
    with pytest.raises(UsageError, match="no run of the study"):
        write_study_report(study, ["train.steps=200"])
    out = tmp_path / "elsewhere.html"
    # The first of them stands where a run folder may.
    assert main(["report", f"train.steps={STEPS}", "--study", str(study), "corpus.path=a//b", "--out", str(out)]) == 0
    assert out.is_file() and not (tmp_path / "runs" / "prior" / "report.html").exists()


def test_a_run_that_was_trained_otherwise_is_left_out_and_named(study, tmp_path):
    """What a run is, not what it was run with: threads, layout and folders are not compared."""
    first, second, *_ = (run.loaded.config.model_dump(mode="json") for run in load_study(study).runs)
    first["model"]["hidden_size"], second["train"]["threads"] = 64, 9
    study_folder.write_run(tmp_path, "fixed-3", 1, config=first)
    study_folder.write_run(tmp_path, "pln-3", 1, config=second)
    results = read_study(study)
    (other,) = results.left_out
    assert (other.name, other.state) == ("fixed-3-s1", "trained with model.hidden_size 64, not 32")
    assert "fixed-3-s1 (trained with model.hidden_size 64, not 32)" in left_out(results)
    assert {arm.name: list(arm.runs) for arm in results.arms} == {"fixed-3": [2, 3], "pln-3": [1, 2, 3], "learned": [1, 2, 3]}


def test_a_law_that_is_not_finite_is_no_law(study, tmp_path):
    told = study_folder.records("learned", 1)
    told[-1]["prior"]["probabilities"] = [math.nan, 1.0]
    study_folder.write_run(tmp_path, "learned", 1, told)
    assert rows(page(read_study(study)), "Law at the end")[2][:2] == ["learned", "3"]


def test_a_page_goes_where_a_file_can_be(study, tmp_path):
    for place, sentence in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "no/page.html", "is in no folder that exists; make"),
    ):
        with pytest.raises(UsageError, match=sentence):
            write_study_report(study, (), place)
    assert not list(tmp_path.rglob("*.partial"))


def test_names_are_escaped_everywhere(tmp_path):
    name = "</script><script>alert(1)</script>"
    arms = {"odd": [f"corpus.path={name}"]}
    study_folder.write_run(tmp_path, "odd", 1, study_folder.records("learned", 1), manifest=run_folder.manifest(
        corpus={"path": name}, versions={name: name}, git={"revision": name}))  # fmt: skip
    study = study_folder.study_file(tmp_path, arms, (1,)).rename(tmp_path / "<b>a&b.yaml")
    (tmp_path / "runs" / "prior").rename(tmp_path / "runs" / "<b>a&b")
    text = page(read_study(study))
    parsed = Page(text)
    assert parsed.open == [] and parsed.loads == []
    assert len(parsed.scripts) == 3 and not any("alert" in script for script in parsed.scripts)
    assert "<b>a&b compares 1 arm (odd)" in parsed.text and f"corpus.path={name}" in parsed.text
    assert parsed.links[0]["download"] == "<b>a&b-perplexity.csv"


def large(folder, arms: int, depths: int, steps: int = 3000):
    """A study of laws that all move, a record every ten steps, with the digits that a real run writes, and all that is
    diagnosed and evaluated."""
    rng = np.random.default_rng(1)
    names = [f"learned-{arm}" for arm in range(arms)]
    for name in names:
        for seed in SEEDS:
            told = []
            logits = rng.normal(size=depths)
            for step in range(10, steps + 1, 10):
                logits += rng.normal(0, 0.05, depths)
                p = np.exp(logits) / np.exp(logits).sum()
                record = run_folder.record(step, float(rng.normal(5, 0.1)), prior=study_folder.law(p.tolist()))
                record["state_norm"] = rng.uniform(1, 9, 6).tolist()
                told.append(record | {"validation": {depth: float(rng.normal(5)) for depth in ("1", "3", "6")}})
                if step % 100 == 0:
                    norm, rms, along, *radial = rng.uniform(1, 2, 6).tolist()
                    counts = dict(enumerate(rng.integers(1, 500, 24).tolist(), 20))  # six octaves of norms
                    clamp = {"rms": rms, "radial": along}
                    told[-1]["scale"] = study_folder.diagnosis(norm, counts, radial, clamp=clamp)
            run = study_folder.write_run(folder, name, seed, told)
            study_folder.write_exits(run, study_folder.exits(*rng.uniform(4, 6, 2).tolist(), checkpoint=f"step-{steps}"))
    path = study_folder.study_file(folder, {name: ["depth.prior=learned"] for name in names})
    config = yaml.safe_load((folder / "run.yaml").read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump(config | {"train": {"steps": steps}}))
    return path


@pytest.mark.parametrize(("arms", "depths"), [(5, 16), (9, 40)])
def test_a_page_of_many_records_is_thinned_below_two_megabytes(tmp_path, arms, depths):
    path, left_out = write_study_report(large(tmp_path, arms, depths))
    assert left_out == ""
    assert path.stat().st_size < LIMIT
    figures = packed.data(path.read_text(encoding="utf-8"))["figures"]
    assert len(figures) == 12 + arms
    share = min(1, 5 / arms)
    assert {len(trace["x"]) for trace in figures["law_mean"]["data"]} == {int(POINTS * share)}
    assert len(figures["law-learned-0"]["data"][0]["x"]) == int(TIMES * share)
    assert figures["law-learned-0"]["data"][0]["x"][-1] == 3000


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
def test_a_browser_draws_all_figures_and_has_nothing_to_say(study):
    report, _ = write_study_report(study)
    done = subprocess.run([sys.executable, CHECK, report, "--figures", "8"], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "8 of 8 figures drawn, 0 console messages\n"), done.stdout + done.stderr
