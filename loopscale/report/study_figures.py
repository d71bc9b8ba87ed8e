"""The figures of a study. Curves are means over an arm's seeds, thinned to what a figure can show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import plotly.graph_objects as go

from loopscale.report import scale_figures
from loopscale.report import study_findings as findings
from loopscale.report.findings import perplexity
from loopscale.report.panel import Panel, empty_figure, log_axis, loop_ticks
from loopscale.report.statistics import Estimate, estimate, paired_difference, rounded, thinned, total_variation
from loopscale.report.study import Arm, StudyResults, final_rms, law_entropy, law_mean, validation_loss
from loopscale.report.study_exits import frontier
from loopscale.report.study_styles import styles

POINTS = 200
"""Of a curve, at most, while a figure has no more than five: with more of them, five times as many are shared."""
FEW = 30
"""Points of a curve are marked when there are no more."""
TIMES = 40
"""Of a heat map, at most, in the same way."""
VISIBLE = 1e-3
"""Laws are drawn as far as a probability reaches this."""

NO_LAW = "The records hold no law: they are of a loopscale that did not write it."

Courses = dict[str, dict[int, Estimate]]
"""Curves by arm and step."""


def panels(study: StudyResults) -> list[Panel]:
    """All figures that there is something for, in their order on the page."""
    found = (
        final_perplexity(study),
        held_out(study),
        scale_figures.gain(study),
        frontier(study),
        *(of_laws(study) if study.has_laws else ()),
        state_scale(study),
        scale_figures.final_norm(study),
        scale_figures.token_norms(study),
        scale_figures.radial(study),
        scale_figures.clamp(study),
    )
    return [panel for panel in found if panel]


def of_laws(study: StudyResults) -> Iterator[Panel]:
    """How the laws of depths moved, and where they ended."""
    laws = {arm.name: found for arm in study.arms if (found := arm.laws())}
    yield from laws_over_time(laws)
    yield final_law(study, laws)
    yield law_course(study, "mean", "loops", law_mean)
    yield law_course(study, "entropy", "nats", law_entropy)


def final_perplexity(study: StudyResults) -> Panel:
    """Held-out perplexity at the end by depth."""
    rows: list[dict[str, Any]] = [
        {"arm": arm.name, "depth": depth}
        | {"perplexity": rounded(found.mean, 6), "standard_error": found.rounded_error, "seeds": found.n}
        for arm in study.arms
        for depth in arm.depths
        if (found := final_perplexities(arm, depth))
    ]
    first = study.reference
    at_depth = {arm.name: found for arm in study.arms if (found := final_perplexities(arm, first.depth))}
    differences = {
        arm.name: found
        for arm in study.arms[1:]
        if (found := paired_difference(arm.losses(first.depth), first.losses(first.depth)))
    }
    title = findings.final_perplexity_finding(first.depth, at_depth, first.name, differences)
    if not rows:
        return Panel("perplexity", title, "The last records hold no finite held-out loss.", rows, None)
    figure = empty_figure("depth (loops)", "perplexity (log scale)", loops=max(row["depth"] for row in rows))
    for arm, style in styles(study):
        own = [row for row in rows if row["arm"] == arm.name]
        figure.add_scatter(
            x=[row["depth"] for row in own],
            y=[row["perplexity"] for row in own],
            error_y={"type": "data", "array": [row["standard_error"] for row in own]},
            mode="lines+markers",
            hovertemplate="%{y:.2f}",
            **style,
        )
    figure.update_yaxes(log_axis([row["perplexity"] for row in rows]))
    return Panel("perplexity", title, "At the last step; mean over seeds, bars: ± one standard error.", rows, figure)


def held_out(study: StudyResults) -> Panel:
    """Held-out loss at each arm's evaluation depth by step."""
    courses = _courses(study, lambda arm: arm.curve(lambda record: validation_loss(record, arm.depth)))
    if not courses:
        return Panel("held_out", "No held-out loss was logged", "validation.every sets how often it is measured.", [], None)
    depths = sorted({arm.depth for arm in study.arms})
    own = ", each arm's own" if len(depths) > 1 else ""
    note = f"At depth {' or '.join(map(str, depths))}{own}; mean over seeds."
    figure = _lines(study, courses, "held-out loss (nats per token)", ".4f")
    return Panel("held_out", findings.loss_course_finding(courses), note, _course_rows(courses, "loss"), figure)


def laws_over_time(laws: Mapping[str, Mapping[int, list[float]]]) -> Iterator[Panel]:
    """A heat map for each arm whose law moved, all in one range of depths and colours."""
    moved = {}
    for arm, own in laws.items():
        steps = list(own)
        if total_variation(own[steps[0]], own[steps[-1]]) >= findings.SAME_LAW:
            moved[arm] = {step: own[step] for step in thinned(steps, _share(TIMES, len(laws)))}
    shown = [law for own in moved.values() for law in own.values()]
    depths = range(1, _reach(shown) + 1)
    top = max((max(law) for law in shown), default=1.0)
    for arm, own in moved.items():
        z = [[rounded(law[depth - 1]) if depth <= len(law) else 0.0 for law in own.values()] for depth in depths]
        rows = [
            {"step": step} | {f"p_{depth}": line[index] for depth, line in zip(depths, z, strict=True)}
            for index, step in enumerate(own)
        ]
        figure = empty_figure("optimizer step", "depth R (loops)")
        figure.add_heatmap(
            x=list(own),
            y=list(depths),
            z=z,
            zmin=0,
            zmax=rounded(top),
            meta="scale",
            name="",
            colorbar_title_text="p",
            hovertemplate="step %{x:,}, depth %{y}: %{z:.3f}",
        )
        figure.update_yaxes(loop_ticks(depths[-1]), showgrid=False)
        figure.update_layout(hovermode="closest")
        first, *_, last = own.values()
        note = f"Probability that the next step draws R, mean over seeds, at {len(own)} of {len(laws[arm])} logged steps."
        yield Panel(f"law-{arm}", findings.law_moved_finding(arm, first, last), note, rows, figure)


def final_law(study: StudyResults, laws: Mapping[str, Mapping[int, list[float]]]) -> Panel:
    """The law of each arm after the last step."""
    final = {arm: own[max(own)] for arm, own in laws.items()}
    if not final:
        return Panel("final_law", "The laws at the end are not known", NO_LAW, [], None)
    rows: list[dict[str, Any]] = [
        {"arm": arm, "depth": depth, "probability": rounded(own[depth - 1]) if depth <= len(own) else 0.0}
        for arm, own in final.items()
        for depth in range(1, _reach(final.values()) + 1)
    ]
    entropies = {arm.name: found.mean for arm in study.arms if (found := estimate(arm.final(law_entropy).values()))}
    title = findings.final_law_finding(entropies) if entropies else "The laws at the end"
    figure = empty_figure("depth R (loops)", "probability", loops=max(row["depth"] for row in rows))
    for arm, style in styles(study):
        own_rows = [row for row in rows if row["arm"] == arm.name]
        if own_rows:
            figure.add_scatter(
                x=[row["depth"] for row in own_rows],
                y=[row["probability"] for row in own_rows],
                mode="lines+markers",
                hovertemplate="%{y:.1%}",
                **style,
            )
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return Panel("final_law", title, "The law that a step after the last would draw from, mean over seeds.", rows, figure)


def law_course(study: StudyResults, what: str, unit: str, pick: Callable[[dict[str, Any]], float | None]) -> Panel:
    """The law's mean or entropy by step."""
    courses = _courses(study, lambda arm: arm.curve(pick))
    if not courses:
        return Panel(f"law_{what}", f"The {what} of the law is not known", NO_LAW, [], None)
    figure = _lines(study, courses, f"{what} of the law ({unit})", ".3f")
    title = findings.law_course_finding(what, courses)
    return Panel(f"law_{what}", title, "Mean over seeds.", _course_rows(courses, what), figure)


def state_scale(study: StudyResults) -> Panel:
    """Scale of the state after the last loop by step."""
    courses = _courses(study, lambda arm: arm.curve(lambda record: final_rms(record, arm.config.model.hidden_size) or None))
    if not courses:
        return Panel("state_scale", "The state's scale is not known", "The records hold no norm of the state.", [], None)
    figure = _lines(study, courses, "RMS of a token's state (log scale)", ".3g")
    figure.update_yaxes(log_axis([point.mean for course in courses.values() for point in course.values()]))
    note = "After the last loop of a step's deepest draw; mean over tokens and seeds."
    return Panel("state_scale", findings.scale_finding(courses), note, _course_rows(courses, "rms"), figure)


def final_perplexities(arm: Arm, depth: int) -> Estimate | None:
    """exp(loss) at the end over the seeds: the mean of perplexities, not the exponential of the mean loss."""
    return estimate(None if nats is None else perplexity(nats) for nats in arm.losses(depth).values())


# --- shaping ---------------------------------------------------------------------------------------------------------


def _courses(study: StudyResults, curve: Callable[[Arm], dict[int, Estimate]]) -> Courses:
    """Thinned curves of the arms that have one."""
    found = {arm.name: curve(arm) for arm in study.arms}
    return {
        arm: {step: points[step] for step in thinned(list(points), _share(POINTS, len(found)))}
        for arm, points in found.items()
        if points
    }


def _share(most: int, arms: int) -> int:
    """What one of so many arms may draw, so that the page's size has a bound; never less than both ends."""
    return max(2, min(most, 5 * most // arms))


def _course_rows(courses: Courses, column: str) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "step": step, column: rounded(point.mean, 6), "standard_error": point.rounded_error, "seeds": point.n}
        for arm, points in courses.items()
        for step, point in points.items()
    ]


def _lines(study: StudyResults, courses: Courses, unit: str, form: str) -> go.Figure:
    """A line over steps for each arm."""
    figure = empty_figure("optimizer step", unit)
    for arm, style in styles(study):
        if points := courses.get(arm.name):
            figure.add_scatter(
                x=list(points),
                y=[rounded(point.mean, 5) for point in points.values()],
                mode="lines+markers" if len(points) <= FEW else "lines",
                hovertemplate=f"%{{y:{form}}}",
                **style,
            )
    return figure


def _reach(laws: Iterable[list[float]]) -> int:
    """The largest depth whose probability is visible in one of the laws."""
    return max((depth for law in laws for depth, share in enumerate(law, 1) if share >= VISIBLE), default=1)
