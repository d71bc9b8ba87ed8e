"""The four figures of a run: data shaped for plotly, each with its finding and its rows for the CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import plotly.graph_objects as go

from loopscale.report import findings
from loopscale.report.panel import Panel, empty_figure, log_axis, mode
from loopscale.report.run import Run
from loopscale.report.statistics import mean_law, total_variation

MOVED = 0.02
"""Total variation by which a law must end away from where it began to be shown as one that moved."""


def panels(run: Run) -> list[Panel]:
    """The four figures of the first screen."""
    return [loss(run), perplexity(run), depths(run), state_norm(run)]


def loss(run: Run) -> Panel:
    """Training and validation loss by step, with the n-gram models' loss where an evaluation knows it."""
    depth = run.validation_depth()
    rows = [
        {"step": record["step"], "training_loss": record.get("loss")}
        | {f"validation_loss_depth_{each}": value for each, value in (record.get("validation") or {}).items()}
        for record in run.records
    ]
    training = _present((row["step"], row["training_loss"]) for row in rows)
    validation = _present((row["step"], row.get(f"validation_loss_depth_{depth}")) for row in rows)
    baselines = _baselines(run)
    title = findings.loss_finding(training, validation, depth, baselines)
    if not training:
        return Panel("loss", title, "Appears with the first logged step.", rows, None)
    figure = empty_figure("optimizer step", "loss (nats per token)")
    # Gaps stay gaps: a null between two points is a step whose loss was not finite.
    figure.add_scatter(
        x=[row["step"] for row in rows],
        y=[row["training_loss"] for row in rows],
        name="training",
        meta="first",
        mode=mode(training),
        hovertemplate="%{y:.3f}",
    )
    if validation:
        figure.add_scatter(
            x=list(validation),
            y=list(validation.values()),
            name=f"validation, depth {depth}",
            meta="second",
            mode="lines+markers",
            hovertemplate="%{y:.3f}",
        )
    _add_references(figure, baselines, training, ".3f")
    note = "Training loss is that of one batch, at the depths it drew."
    return Panel("loss", title, note, rows, figure)


def perplexity(run: Run) -> Panel:
    """Perplexity by depth of the newest evaluation."""
    evaluation = run.evaluation
    if not evaluation:
        note = f"loopscale eval runs/{run.name} makes one; this figure then shows its perplexity at every depth."
        return Panel("perplexity", findings.perplexity_finding({}), note, [], None)
    columns = zip(evaluation["depths"], evaluation["loss"], evaluation["perplexity"], strict=True)
    rows = [{"depth": depth, "loss": nats, "perplexity": value} for depth, nats, value in columns]
    finite = _present((row["depth"], row["perplexity"]) for row in rows)
    title = findings.perplexity_finding(finite)
    if not finite:
        return Panel("perplexity", title, "The newest evaluation holds no finite perplexity.", rows, None)
    figure = empty_figure("depth (loops)", "perplexity (log scale)", loops=max(finite))
    figure.add_scatter(
        x=[row["depth"] for row in rows],
        y=[row["perplexity"] for row in rows],
        customdata=[row["loss"] for row in rows],
        name="perplexity",
        meta="first",
        mode="lines+markers",
        hovertemplate="%{y:.2f} (%{customdata:.4f} nats)",
        showlegend=False,
    )
    lowest, highest = min(finite.values()), max(finite.values())
    near = (lowest / (2 * highest / lowest), highest * (2 * highest / lowest))  # farther ones would flatten the curve
    references = {name: math.exp(nats) for name, nats in _baselines(run).items()}
    shown = {name: value for name, value in references.items() if near[0] <= value <= near[1]}
    _add_references(figure, shown, finite, ".1f")
    figure.update_yaxes(log_axis([*finite.values(), *shown.values()]))
    far = [f"{name} {findings.number(value)}" for name, value in references.items() if name not in shown]
    note = protocol(evaluation) + (f"; off the scale: {', '.join(far)}" if far else "")
    return Panel("perplexity", title, note, rows, figure)


def depths(run: Run) -> Panel:
    """Drawn depths against the prior's law; one that moved is shown by its mean over the run, and as it ended."""
    draws = Counter(depth for record in run.records for depth in record.get("depths") or [])
    begin: list[float] = run.about("prior").get("pmf") or []
    laws = [law for record in run.records if (law := (record.get("prior") or {}).get("probabilities"))]
    moved = bool(laws) and total_variation(laws[0], laws[-1]) > MOVED
    pmf = mean_law([begin, *laws[:-1]]) if moved and begin else begin  # a record has the law of the step after it
    title = findings.depth_finding(draws, pmf)
    if not draws:
        return Panel("depths", title, "Appears with the first logged step.", [], None)
    # A law with a long tail (cap 64) is shown as far as a draw or one in a thousand reaches.
    likely = [depth for law in (pmf, *laws[-1:]) for depth, share in enumerate(law, 1) if share >= 1e-3]
    shown = range(1, max([*draws, *likely]) + 1)
    count = sum(draws.values())
    curves = ({"prior": pmf} if pmf else {}) | ({"prior_at_end": laws[-1]} if moved else {})
    rows = [
        {"depth": depth, "draws": draws[depth], "share": draws[depth] / count}
        | {name: law[depth - 1] if depth <= len(law) else 0.0 for name, law in curves.items()}
        for depth in shown
    ]
    figure = empty_figure("depth R (loops)", "share of draws", loops=shown[-1])
    figure.add_bar(
        x=list(shown),
        y=[row["share"] for row in rows],
        customdata=[row["draws"] for row in rows],
        name="drawn",
        meta="first",
        hovertemplate="%{y:.1%} (%{customdata} draws)",
    )
    called = f"prior {run.about('prior').get('name', '')}".strip()
    names = {"prior": f"{called}, mean over the run" if moved else called, "prior_at_end": f"{called} at the end"}
    for curve, role in zip(curves, ("second", "late"), strict=False):
        # Steps, not slopes: a law over whole numbers has nothing in between.
        figure.add_scatter(
            x=list(shown), y=[row[curve] for row in rows], name=names[curve], meta=role, mode="lines", line_shape="hvh",
            hovertemplate="%{y:.1%}",
        )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return Panel("depths", title, "One draw per depth group, at logged steps only.", rows, figure)


def state_norm(run: Run) -> Panel:
    """Scale of the state by loop, early, midway and late in training: mean over tokens, and 99th percentile."""
    logged = [record for record in run.records if _present(enumerate(record.get("state_norm") or []))]
    if not logged:
        return Panel("state_norm", "No state norm has been logged", "Appears with the first logged step.", [], None)
    chosen = {record["step"]: record for record in (logged[0], logged[len(logged) // 2], logged[-1])}
    scale = 1 / math.sqrt(run.width) if run.width else 1.0
    measure = "RMS" if run.width else "L2 norm"
    rows = [
        {"step": step, "loop": loop, "mean": _scaled(mean, scale), "p99": _scaled(p99, scale)}
        for step, record in chosen.items()
        for loop, (mean, p99) in enumerate(zip_longest(record["state_norm"], record.get("state_norm_p99") or []), 1)
    ]
    means = {step: list(_present((row["loop"], row["mean"]) for row in rows if row["step"] == step).values()) for step in chosen}
    title = findings.norm_finding((logged[0]["step"], means[logged[0]["step"]]), (logged[-1]["step"], means[logged[-1]["step"]]))
    figure = empty_figure("loop r", f"{measure} of a token's state", loops=max(row["loop"] for row in rows))
    for step, role in zip(chosen, ("early", "middle", "late")[-len(chosen) :], strict=True):
        own = [row for row in rows if row["step"] == step]
        for column, label, dash in (("mean", "", "solid"), ("p99", " p99", "dot")):
            if any(row[column] is not None for row in own):
                figure.add_scatter(
                    x=[row["loop"] for row in own],
                    y=[row[column] for row in own],
                    name=f"step {step:,}{label}",
                    meta=role,
                    legendgroup=step,
                    showlegend=column == "mean",
                    mode="lines+markers",
                    line_dash=dash,
                    hovertemplate="%{y:.3g}",
                )
    figure.update_yaxes(rangemode="tozero")
    note = "Mean over tokens, dotted: 99th percentile. Lines end at the deepest draw of their step."
    return Panel("state_norm", title, note, rows, figure)


def protocol(evaluation: Mapping[str, Any]) -> str:
    """How an evaluation was made."""
    count, length = evaluation.get("sequences"), evaluation.get("sequence_length")
    parts = [
        str(evaluation.get("source") or ""),
        f"checkpoint {evaluation['checkpoint']}" if evaluation.get("checkpoint") else "",
        f"{count:,} sequences of {length:,} tokens" if count and length else "",
        str(evaluation.get("protocol") or ""),
    ]
    return ", ".join(part for part in parts if part)


# --- shaping ---------------------------------------------------------------------------------------------------------


def _add_references(figure: go.Figure, references: Mapping[str, float], points: Mapping[int, float], form: str) -> None:
    """A labelled horizontal line for each reference model, as traces: they follow a log axis and answer the mouse.

    Curves fall from the left: a line that they end below is labelled at the right, one that they end above at the left.
    """
    left, right = min(points), max(points)
    for name, value in references.items():
        label = f"{name} {findings.number(value)}"
        at_right = value >= points[right]
        figure.add_scatter(
            x=[left, right],
            y=[value, value],
            name=name,
            meta="reference",
            mode="lines+text",
            text=["", label] if at_right else [label, ""],
            textposition="top left" if at_right else "top right",
            cliponaxis=False,  # the label of the topmost line stands above the axes
            hovertemplate=f"%{{y:{form}}}",
            showlegend=False,
        )


def _baselines(run: Run) -> dict[str, float]:
    """Loss of the n-gram models in nats per token, as the newest evaluation measured it."""
    known = (run.evaluation or {}).get("baselines") or {}
    return {name: nats for name, nats in known.items() if nats is not None}


def _present(points: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    return {x: y for x, y in points if y is not None}


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
