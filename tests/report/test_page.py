"""The page: one file, whole without network, safe with any name, drawn without a word on the console."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from plotly.offline import get_plotlyjs

from loopscale.errors import UsageError
from loopscale.report import write_report
from loopscale.report.document import pack
from loopscale.report.figures import panels
from loopscale.report.page import page, summary
from loopscale.report.run import Run, read_run
from tests.report import packed, run_folder
from tools.check_report import inspect

CHECK = Path(__file__).parents[2] / "tools" / "check_report.py"


class Page(HTMLParser):
    """What a browser would load and show."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.loads, self.links, self.scripts, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        if tag != "a":
            self.loads += [values[key] for key in ("src", "href", "data", "srcset") if key in values]
        else:
            self.links.append(values)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data


def test_one_well_formed_file_that_loads_nothing(tmp_path):
    path = write_report(run_folder.whole(tmp_path))
    assert path == tmp_path / "report.html"
    parsed = Page(path.read_text(encoding="utf-8"))
    assert parsed.open == [] and parsed.loads == []
    style = path.read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert not list(tmp_path.glob("*.partial"))


def test_csv_links_hold_what_the_figures_draw(tmp_path):
    run = read_run(run_folder.whole(tmp_path))
    text = page(run)
    links = {link["download"]: link["data-table"] for link in Page(text).links}
    for panel in panels(run):
        assert packed.data(text)["tables"][links[f"tiny-{panel.key}.csv"]] == panel.csv()


def test_packed_text_is_plain_in_html_and_comes_back_whole():
    for length in range(20):
        text = "ä</script><!--"[:length] * 3
        found = pack(text)
        assert "<" not in found
        assert packed.unpacked(f'<script id="data" type="application/gzip">{found}</script>', "data") == text
    assert packed.unpacked(page(Run("none", [])), "plotly") == get_plotlyjs()


def test_the_sentence_says_what_how_good_and_by_which_protocol(tmp_path):
    text = Page(summary(read_run(run_folder.whole(tmp_path)))).text
    assert text == (
        "tiny, a looped language model of 1.91M parameters (3.4M effective at depth 5), trained for 30 steps on 61.4k tokens"
        " (1 epochs) of data/sotu, reaches perplexity 94.3 at depth 5 (unigram 571, bigram 63.0) (validation split of data/sotu,"
        " checkpoint step-30, 64 sequences of 128 tokens, own KV at every depth, whole sequences, documents isolated)."
    )


def test_the_sentence_of_a_run_without_evaluation(tmp_path):
    records = [run_folder.record(10, 8.0, validation={"1": 5.0, "3": 4.0}), run_folder.record(20, 7.0, validation={"1": None})]
    folder = run_folder.write(tmp_path / "young", records[:1])
    assert Page(summary(read_run(folder))).text == (
        "young, a looped language model, trained for 10 steps on 20.5k tokens,"
        " had perplexity 54.6 at depth 3 at its last validation, step 10."
    )
    folder = run_folder.write(tmp_path / "diverged", records)
    assert summary(read_run(folder)).endswith("has not been evaluated; its last training loss is <b>7.00 nats per token</b>.")
    folder = run_folder.write(tmp_path / "empty", [])
    assert summary(read_run(folder)) == "<b>empty</b>, a looped language model, not trained yet, has no result yet."


def test_sections_show_events_config_with_origins_and_environment(tmp_path):
    text = Page(page(read_run(run_folder.whole(tmp_path)))).text
    for shown in (
        "2026-11-30 06:02:00 UTC", "resumed", "<b>blind</b> spot\nremedy: none", "model.hidden_size", "configs/tiny.yaml",
        "default", "torch version", "2.14.1", "git revision", "5c1e", "1,912,448", "seed 7",
        "f57258f61 with uncommitted changes",
        "tokens per second, median", "2,920", "81%", "0:00:21",
    ):  # fmt: skip
        assert shown in text, shown
    assert "a secret" not in text


def test_memory_is_told_by_kind_of_the_heaviest_rank_of_each_stage_beside_what_was_predicted(tmp_path):
    """Ranks 0 and 1 are home, rank 2 is stage 1; rank 1 holds most of all at the second logged step."""
    memory = {"parameters": [2**28, 2**28, 2**27], "optimizer_cpu": [0, 0, 0], "peak": [2**30, 2**29, 2**28]}
    records = [run_folder.record(1, 5.0, memory=memory), run_folder.record(2, 4.0, memory=memory | {"peak": [0, 2**31, 0]})]
    about = {"stages": [0, 0, 1], "predicted": [{"parameters": 2**28, "peak": 3 * 2**29}, {"parameters": 2**26, "peak": 2**28}]}
    folder = run_folder.write(tmp_path, records, manifest=run_folder.manifest(memory=about))
    table = page(read_run(folder)).split("memory, GiB")[1].split("</table>")[0]
    rows = [re.findall("<td>(.*?)</td>", row) for row in table.split("<tr>")[1:]]
    assert rows == [
        ["0 (rank 1)", "parameters", "0.250", "0.250"],
        ["0 (rank 1)", "peak", "2.000", "1.500"],
        ["1 (rank 2)", "parameters", "0.125", "0.062"],
        ["1 (rank 2)", "peak", "0.250", "0.250"],
    ]


def test_names_are_escaped_everywhere(tmp_path):
    name = "</script><script>alert(1)</script>"
    evaluation = run_folder.evaluation(source=name, protocol=name, baselines={name: 6.0})
    manifest = run_folder.manifest(name=name, corpus={"path": name}, prior={"name": name, "pmf": [1.0], "mean": 1})
    folder = run_folder.write(
        tmp_path,
        [run_folder.record(10, 8.0, depths=[1])],
        manifest=manifest,
        config={"run": {"name": name}},
        events=[{"kind": name, "message": name}],
        evaluations=[evaluation],
    )
    text = page(read_run(folder))
    parsed = Page(text)
    assert parsed.open == []
    assert not any("alert" in script for script in parsed.scripts)
    assert name in [trace["name"] for trace in packed.data(text)["figures"]["perplexity"]["data"]]


@pytest.mark.parametrize("records", [[], [run_folder.record(10, 8.0)], [run_folder.record(10, None, depths=[], state_norm=[])]])
def test_young_runs_have_a_page(tmp_path, records):
    parsed = Page(write_report(run_folder.write(tmp_path, records)).read_text(encoding="utf-8"))
    assert parsed.open == [] and "Nothing recorded." in parsed.text


def test_half_written_and_broken_files_are_left_out_and_told(tmp_path):
    folder = run_folder.whole(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    (folder / "evaluations" / "9.json").write_text('{"created": ')
    (folder / "config.yaml").write_text("a: [")
    run = read_run(folder)
    assert [record["step"] for record in run.records] == [10, 20, 30]
    assert run.evaluation is not None
    assert sorted(run.unreadable) == ["config.yaml", "evaluations/9.json"]
    assert "evaluations/9.json cannot be read and is left out" in Page(page(run)).text


def test_another_folder_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"is not a run folder: it has no metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
def test_a_browser_draws_all_figures_and_has_nothing_to_say(tmp_path):
    report = write_report(run_folder.whole(tmp_path))
    done = subprocess.run([sys.executable, CHECK, report], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "4 of 4 figures drawn, 0 console messages\n"), done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
def test_a_browser_without_decompression_shows_a_sentence_and_the_findings(tmp_path):
    text = page(read_run(run_folder.whole(tmp_path)))
    old = text.replace('"DecompressionStream" in window', '"DecompressionStreamX" in window')
    assert old != text
    (tmp_path / "old.html").write_text(old, encoding="utf-8")
    drawn, messages, dom = inspect(tmp_path / "old.html", "chromium")
    assert (drawn, messages) == (0, [])
    shown = Page(dom).text
    assert "too old" in shown and "Perplexity falls from 231" in shown


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
def test_a_browser_unpacks_the_csv_links(tmp_path):
    run = read_run(run_folder.whole(tmp_path))
    drawn = Page(inspect(write_report(tmp_path), "chromium")[2])
    links = {link["data-table"]: link["href"] for link in drawn.links}
    for panel in panels(run):
        kind, content = links[panel.key].split(",", 1)
        assert (kind, unquote(content)) == ("data:text/csv;charset=utf-8", panel.csv())
    assert "too old" not in drawn.text


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
def test_the_check_notices_a_fault(tmp_path):
    report = write_report(run_folder.whole(tmp_path))
    report.write_text(report.read_text(encoding="utf-8").replace("const colour =", "const colours ="), encoding="utf-8")
    done = subprocess.run([sys.executable, CHECK, report], capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and "colour is not defined" in done.stdout
