"""The figures of a study of the state's scale. Each is left out where no run holds what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from loopscale.report import study_findings as findings
from loopscale.report import study_scale as scale
from loopscale.report.findings import span
from loopscale.report.panel import Panel, empty_figure, log_axis
from loopscale.report.statistics import Estimate, estimate, rounded
from loopscale.report.study import StudyResults
from loopscale.report.study_findings import measured
from loopscale.report.study_styles import Style, styles

UNTRAINED = 2.0
"""Of an arm whose perplexity at depth 1 is more than this many times that at K the first exit is hardly trained: its gain may
be off the scale of the others."""
LETTERS = 90
"""Of names, side by side under a figure."""
SEEDS_SHOWN = "Mean over seeds, bars: ± one standard error, faint: each seed."


def final_norm(study: StudyResults) -> Panel | None:
    """Norm of a token's state at the evaluation depth by arm."""
    norms = {arm.name: scale.last(arm, scale.norm) for arm in study.arms}
    found = _estimates(norms)
    if not found:
        return None
    figure = _by_arm(study, norms, "L2 norm of the state (log scale)")
    figure.update_yaxes(log_axis([value for values in norms.values() for value in values.values() if value is not None]))
    note = f"{_protocol(study)}; L2, mean over tokens. {SEEDS_SHOWN}"
    return Panel("final_norm", findings.final_norm_finding(found, len(study.arms)), note, _arm_rows(norms, "norm"), figure)


def gain(study: StudyResults) -> Panel | None:
    """What the loops after the first take from perplexity, by arm."""
    values = {arm.name: scale.gains(arm) for arm in study.arms}
    found, ratios = _estimates(values), _estimates({arm.name: scale.gaps(arm) for arm in study.arms})
    if not found:
        return None
    figure = _by_arm(study, values, "perplexity at depth 1 − at K", signed=True)
    _add_zero(figure, len(study.arms))
    depths = {arm.name: arm.config.depth.evaluation_depth for arm in study.arms}
    rows = [
        row | {"depth": depths[row["arm"]], "ratio": rounded(ratios[row["arm"]].mean, 6)} for row in _arm_rows(values, "gain")
    ]
    near = [abs(found[arm].mean) for arm, ratio in ratios.items() if ratio.mean <= UNTRAINED]
    far = [arm for arm, ratio in ratios.items() if ratio.mean > UNTRAINED and near and found[arm].mean > 10 * max(near)]
    if far:
        shown = [value or 0 for arm, own in values.items() if arm not in far for value in own.values()]
        figure.update_yaxes(range=[min(0, *shown) - max(near) / 5, max(shown) + max(near) / 5])
    deep = " or ".join(str(depth) for depth in sorted({depths[arm] for arm in found}))
    note = f"Held out, at the last step; K = {deep}, the evaluation depth. {SEEDS_SHOWN}"
    note += f" Off the scale: {', '.join(f'{arm} {measured(found[arm], signed=True)}' for arm in far)}." if far else ""
    return Panel("gain", findings.gain_finding(found, ratios), note, rows, figure)


def radial(study: StudyResults) -> Panel | None:
    """The radial part of the gradient of each loop's own loss."""
    rows: list[dict[str, Any]] = [
        {"arm": arm.name, "loop": loop}
        | {"radial_fraction": rounded(found.mean), "standard_error": found.rounded_error, "seeds": found.n}
        for arm in study.arms
        for loop in range(1, arm.config.depth.evaluation_depth + 1)
        if (found := estimate(scale.last(arm, scale.radial_fraction(loop)).values()))
    ]
    if not rows:
        return None
    figure = empty_figure("loop r", "|⟨g, h⟩| / (‖g‖ ‖h‖) (log scale)", loops=max(row["loop"] for row in rows))
    for arm, style in styles(study):
        if own := [row for row in rows if row["arm"] == arm.name]:
            figure.add_scatter(
                x=[row["loop"] for row in own],
                y=[row["radial_fraction"] for row in own],
                error_y={"type": "data", "array": [row["standard_error"] for row in own]},
                mode="lines+markers",
                hovertemplate="%{y:.1e}",
                **style,
            )
    figure.update_yaxes(log_axis([row["radial_fraction"] for row in rows]))
    ends = {row["arm"]: row["radial_fraction"] for row in rows}
    width = study.reference.config.model.hidden_size
    note = (
        f"{_protocol(study)}; g: gradient of the loop's own loss alone, h: the state that it decodes; mean over tokens and seeds,"
        f" bars: ± one standard error. Of random directions {math.sqrt(2 / (math.pi * width)):.2g} at width {width}."
    )
    return Panel("radial", findings.radial_finding(ends, len(study.arms)), note, rows, figure)


def clamp(study: StudyResults) -> Panel | None:
    """What becomes of the loss when the state's scale cannot drift, by kind of clamp and arm."""
    values = {kind: {arm.name: scale.last(arm, scale.clamp_change(kind)) for arm in study.arms} for kind in findings.CLAMPS}
    found = {kind: _estimates(own) for kind, own in values.items()}
    if not any(found.values()):
        return None
    figure = empty_figure("", "change of loss (nats per token)")
    places = len(study.arms) + 1  # one free between the kinds
    for index, kind in enumerate(findings.CLAMPS):
        for place, (arm, style) in enumerate(styles(study)):
            x = index + (place - (places - 2) / 2) / places
            style |= {"showlegend": index == 0, "legendgroup": arm.name}
            _add_seeds(figure, x, 1 / places, values[kind][arm.name], style, signed=True)
    _add_zero(figure, len(findings.CLAMPS))
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(_ticks(findings.CLAMPS.values()))
    rows = [{"clamp": kind} | row for kind, own in values.items() for row in _arm_rows(own, "change")]
    note = f"{_protocol(study)}: loss with the state clamped after each loop minus that without. {SEEDS_SHOWN}"
    return Panel("clamp", findings.clamp_finding(found), note, rows, figure)


def token_norms(study: StudyResults) -> Panel | None:
    """How the norms of tokens are distributed at the evaluation depth."""
    counts = {arm.name: found for arm in study.arms if (found := scale.histogram(arm))}
    if not counts:
        return None
    totals = {arm: sum(bins.values()) for arm, bins in counts.items()}
    rows: list[dict[str, Any]] = [
        {"arm": arm, "norm_from": rounded(low, 6), "norm_to": rounded(high, 6), "tokens": tokens}
        | {"share": rounded(tokens / totals[arm])}
        for arm, bins in counts.items()
        for (low, high), tokens in bins.items()
    ]
    figure = empty_figure("L2 norm of a token's state (log scale)", "share of tokens")
    for arm, style in styles(study):
        if own := [row for row in rows if row["arm"] == arm.name]:
            # Down to zero at both ends: a single bin would make no line.
            step = own[0]["norm_to"] / own[0]["norm_from"]
            middles = [math.sqrt(row["norm_from"] * row["norm_to"]) for row in own]
            figure.add_scatter(
                x=[rounded(x, 5) for x in (middles[0] / step, *middles, middles[-1] * step)],
                y=[0.0, *(row["share"] for row in own), 0.0],
                mode="lines",
                line_shape="hvh",
                hovertemplate="%{y:.1%}",
                **style,
            )
    figure.update_xaxes(log_axis([edge for row in rows for edge in (row["norm_from"], row["norm_to"])]), hoverformat=".3g")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    tails = {arm: found.mean for arm, found in _estimates({arm.name: scale.last(arm, scale.tail) for arm in study.arms}).items()}
    note = f"{_protocol(study)}; the seeds together, four bins an octave."
    return Panel("token_norms", findings.tail_finding(tails, len(study.arms)), note, rows, figure)


# --- shaping ---------------------------------------------------------------------------------------------------------


def _protocol(study: StudyResults) -> str:
    """When and on what the last diagnoses were made."""
    steps, told = zip(*(list(found.items())[-1] for run in study.finished if (found := scale.diagnoses(run))), strict=True)
    depths = sorted({each["depth"] for each in told})
    tokens = span([seen for each in told if (seen := scale.tokens_seen(each))] or [0], "{:,}".format)
    when = f"the last diagnosis, step {span(steps, '{:,}'.format)}"
    runs = "" if len(told) == len(study.finished) else f" ({len(told)} of {len(study.finished)} runs)"
    return f"At depth {' or '.join(map(str, depths))}, by {when}, of {tokens} held-out tokens a run{runs}"


def _estimates(values: Mapping[str, scale.Values]) -> dict[str, Estimate]:
    return {arm: found for arm, own in values.items() if (found := estimate(own.values()))}


def _arm_rows(values: Mapping[str, scale.Values], column: str) -> list[dict[str, Any]]:
    return [
        {"arm": arm, column: rounded(found.mean, 6), "standard_error": found.rounded_error, "seeds": found.n}
        | {f"seed_{seed}": None if value is None else rounded(value, 6) for seed, value in values[arm].items()}
        for arm, found in _estimates(values).items()
    ]


def _by_arm(study: StudyResults, values: Mapping[str, scale.Values], unit: str, signed: bool = False) -> go.Figure:
    """A column of points for each arm."""
    figure = empty_figure("", unit)
    for place, (arm, style) in enumerate(styles(study)):
        _add_seeds(figure, place, 1.0, values[arm.name], style | {"showlegend": False}, signed)
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(_ticks(arm.name for arm in study.arms))
    return figure


def _add_seeds(figure: go.Figure, x: float, room: float, values: scale.Values, style: Style, signed: bool) -> None:
    """The mean over an arm's seeds with its error, and beside it the seeds; nothing for an arm without values."""
    found = estimate(values.values())
    if not found:
        return
    figure.add_scatter(
        x=[x],
        y=[rounded(found.mean, 5)],
        error_y={"type": "data", "array": [found.rounded_error]},
        customdata=[measured(found, signed)],
        mode="markers",
        hovertemplate="%{customdata}",
        **style | {"marker_size": 9},
    )
    seeds = {seed: value for seed, value in values.items() if value is not None}
    if len(seeds) > 1:
        figure.add_scatter(
            x=[x + 0.2 * room] * len(seeds),
            y=[rounded(value, 5) for value in seeds.values()],
            customdata=list(seeds),
            mode="markers",
            hovertemplate=f"seed %{{customdata}}: %{{y:{'+' * signed}.4g}}",
            **style | {"showlegend": False, "marker_opacity": 0.45},
        )


def _add_zero(figure: go.Figure, places: int) -> None:
    figure.add_scatter(
        x=[-0.5, places - 0.5], y=[0, 0], name="zero", meta="reference", mode="lines", hoverinfo="skip", showlegend=False
    )


def _ticks(names: Iterable[str]) -> dict[str, Any]:
    """Of an axis with a place for each name; long ones are broken, for there is no room to turn them."""
    text = list(names)
    broken = ["<br>".join(wrap(name, max(6, LETTERS // len(text)))) for name in text]
    return {"tickvals": list(range(len(text))), "ticktext": broken, "tickangle": 0, "range": [-0.5, len(text) - 0.5]}
