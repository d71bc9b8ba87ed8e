"""The report page: one self-contained HTML file out of figures, tables and plotly's own script."""

from __future__ import annotations

import json
import math
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from urllib.parse import quote

from plotly.offline import get_plotlyjs

from loopscale.report.figures import Panel, panels, protocol
from loopscale.report.findings import number
from loopscale.report.run import Run, read_run
from loopscale.report.sections import moment, sections


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` into a run folder: one file that needs no network.

    Returns:
        The page's path.

    Raises:
        UsageError: it is no run folder.
    """
    path = run_folder / "report.html"
    # Renamed into place: someone may have the page of a running training open.
    temporary = path.with_suffix(".partial")
    temporary.write_text(page(read_run(run_folder)), encoding="utf-8")
    temporary.replace(path)
    return path


def page(run: Run) -> str:
    """The whole page."""
    drawn = panels(run)
    specs = {panel.key: panel.figure.to_plotly_json() for panel in drawn if panel.figure}
    return Template(_asset("page.html")).substitute(
        name=escape(run.name),
        summary=summary(run),
        origin=escape(_origin(run)),
        figures="\n".join(_panel(panel, run.name) for panel in drawn),
        sections="\n".join(sections(run)),
        style=_asset("style.css"),
        # A "<" in a name must not end the script element.
        specs=json.dumps(specs, allow_nan=False).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script=_asset("page.js"),
    )


def summary(run: Run) -> str:
    """One sentence as HTML: what was trained, how good it is, and by which protocol."""
    sizes = run.about("parameters")
    corpus = run.about("corpus")
    what = f"<b>{escape(run.name)}</b>, a looped language model"
    if sizes.get("total"):
        what += f" of {_count(sizes['total'])} parameters"
        if sizes.get("effective") and run.depth:
            what += f" ({_count(sizes['effective'])} effective at depth {run.depth})"
    last = run.records[-1] if run.records else {}
    trained = f"trained for {last['step']:,} steps" if last else "not trained yet"
    if tokens := last.get("tokens"):
        epochs = f" ({tokens / corpus['train_tokens']:.2g} epochs)" if corpus.get("train_tokens") else ""
        trained += f" on {_count(tokens)} tokens{epochs}"
    if last and corpus.get("path"):
        trained += f" of {escape(str(corpus['path']))}"
    return f"{what}, {trained}, {_quality(run)}."


def _quality(run: Run) -> str:
    """How good it is, from the best source there is: an evaluation, else a validation, else the training loss."""
    evaluation = run.evaluation
    scores = dict(zip(evaluation["depths"], evaluation["perplexity"], strict=True)) if evaluation else {}
    finite = {depth: value for depth, value in scores.items() if value is not None}
    if evaluation and finite:
        depth = run.depth if run.depth in finite else min(finite, key=lambda each: finite[each])
        baselines = evaluation.get("baselines") or {}
        against = ", ".join(f"{escape(name)} {number(_perplexity(nats))}" for name, nats in baselines.items() if nats is not None)
        reaches = f"reaches <b>perplexity {number(finite[depth])} at depth {depth}</b>" + (f" ({against})" if against else "")
        return f'{reaches} <span class="protocol">({escape(protocol(evaluation))})</span>'
    depth = run.validation_depth()
    validated = [record for record in run.records if (record.get("validation") or {}).get(str(depth)) is not None]
    if validated:
        value = number(_perplexity(validated[-1]["validation"][depth]))
        return f"had <b>perplexity {value} at depth {depth}</b> at its last validation, step {validated[-1]['step']:,}"
    losses = [record["loss"] for record in run.records if record.get("loss") is not None]
    if losses:
        return f"has not been evaluated; its last training loss is <b>{number(losses[-1])} nats per token</b>"
    return "has no result yet"


def _origin(run: Run) -> str:
    """When, from which code and how it ran, in one line."""
    manifest = run.manifest
    git, layout = run.about("git"), run.about("layout")
    revision = ""
    if git.get("revision"):
        revision = f"revision {str(git['revision'])[:9]}{' with uncommitted changes' if git.get('dirty') else ''}"
    seed = f"seed {manifest['seed']}" if "seed" in manifest else ""
    parts = [moment(manifest.get("created")), seed, revision, ", ".join(f"{key} {value}" for key, value in layout.items())]
    return " · ".join(part for part in parts if part)


def _panel(panel: Panel, run_name: str) -> str:
    """One figure with its finding, note and CSV."""
    title, note = escape(panel.title), escape(panel.note)
    if panel.figure:
        body = f'<div class="plot" id="plot-{panel.key}" data-figure="{panel.key}" role="img" aria-label="{title}"></div>'
    else:
        body = '<div class="plot empty" aria-hidden="true">nothing to draw yet</div>'
    csv = ""
    if panel.rows:
        name = escape(f"{run_name}-{panel.key}.csv")
        csv = f'<a class="csv" download="{name}" href="data:text/csv;charset=utf-8,{quote(panel.csv())}">CSV</a>'
    return f"<figure><figcaption><h2>{title}</h2></figcaption>{body}<footer><p>{note}</p>{csv}</footer></figure>"


def _asset(name: str) -> str:
    return resources.files("loopscale.report").joinpath(name).read_text(encoding="utf-8")


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # exp(710) overflows


def _count(value: float) -> str:
    """1.9M, 2.71M, 4.2B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999,600 is 1M, not 1000k
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"
