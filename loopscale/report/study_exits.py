"""What leaving the loop early costs and saves in a study, from its runs' evaluations of exits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from loopscale.report import study_findings as findings
from loopscale.report.exits import Exits, Measured
from loopscale.report.findings import number, perplexity, span
from loopscale.report.panel import Panel, empty_figure, log_axis
from loopscale.report.run import Run
from loopscale.report.statistics import Estimate, estimate, rounded
from loopscale.report.study import Arm, StudyResults
from loopscale.report.study_styles import styles

NEAR = 1.5
"""Perplexities beyond this many times the worst at a last depth are off the scale: an arm whose first exits were never trained
would flatten all else."""
PLACES = ("top center", "bottom center", "middle right")
"""Of the names of rules beside their marks, which may lie close together."""


@dataclass(frozen=True)
class Way:
    """One way to leave the loop, over an arm's seeds."""

    rule: str | None
    """None: after a fixed number of loops."""
    loops: Estimate
    perplexity: Estimate
    rate: Estimate
    """Tokens per second."""
    exits: tuple[float, ...] = ()
    """Share that leaves after loop 1, 2, …, where a rule decides."""

    def of(self, arm: str) -> str:
        return f"{arm} by {self.rule}" if self.rule else f"{arm} at depth {self.loops.mean:g}"


def evaluated(study: StudyResults) -> list[Exits]:
    """The evaluations of exits that the finished runs hold, of what they ended as."""
    return [found for run in study.finished if (found := of_the_end(run))]


def of_the_end(run: Run) -> Exits | None:
    """A run's evaluation of exits; None where there is none of its last step, for other steps compare with nothing."""
    return run.exits if run.exits and run.exits.step == run.records[-1]["step"] else None


def ways(arm: Arm) -> Iterator[Way]:
    """Fixed depths, then rules; one that has no finite value in any seed is left out."""
    told = [exits for run in arm.runs.values() if (exits := of_the_end(run))]
    for depth in sorted({point.depth for each in told for point in each.fixed}):
        points = [point for each in told for point in each.fixed if point.depth == depth]
        if found := _means(points):
            yield Way(None, Estimate(depth, None, len(points)), *found)
    for rule in dict.fromkeys(rule for each in told for rule in each.rules):
        left = [each.rules[rule] for each in told if rule in each.rules]
        loops = estimate(each.mean_loops for each in left)
        if loops and (found := _means(left)):
            shares = zip_longest(*(each.exits for each in left), fillvalue=0.0)
            yield Way(rule, loops, *found, tuple(math.fsum(each) / len(left) for each in shares))


def _means(points: Sequence[Measured]) -> tuple[Estimate, Estimate] | None:
    """Perplexity and tokens per second."""
    found = estimate(None if each.loss is None else perplexity(each.loss) for each in points)
    rate = estimate(each.tokens_per_second for each in points)
    return (found, rate) if found and rate else None


def frontier(study: StudyResults) -> Panel | None:
    """Perplexity against speed at every fixed depth and under each rule; None where no run has an evaluation of exits."""
    told = evaluated(study)
    found = {arm.name: list(ways(arm)) for arm in study.arms}
    rows = [_row(arm, way) for arm, own in found.items() for way in own]
    if not rows:
        return None
    figure = empty_figure("tokens per second", "perplexity (log scale)")
    for arm, style in styles(study):
        for fixed in (True, False):
            own = [row for row in rows if row["arm"] == arm.name and (row["rule"] is None) == fixed]
            # Rules have the arm's mark, hollow and named.
            marks = {"marker_symbol": f"{style['marker_symbol']}-open", "marker_size": 9, "showlegend": False}
            if own:
                figure.add_scatter(
                    x=[row["tokens_per_second"] for row in own],
                    y=[row["perplexity"] for row in own],
                    error_y={"type": "data", "array": [row["standard_error"] for row in own]},
                    text=[f"depth {row['loops']:g}" if fixed else row["rule"] for row in own],
                    textposition=[PLACES[place % len(PLACES)] for place in range(len(own))],
                    customdata=[row["loops"] for row in own],
                    mode="lines+markers" if fixed else "markers+text",
                    hovertemplate="%{text}: %{y:.2f} at %{x:,.0f} tokens/s, %{customdata:.3g} loops",
                    legendgroup=arm.name,
                    **style | ({} if fixed else marks),
                )
    figure.update_layout(hovermode="closest")
    points = {way.of(arm): (way.perplexity.mean, way.rate.mean) for arm, own in found.items() for way in own}
    deepest = [own[-1]["perplexity"] for arm in found if (own := [row for row in rows if row["arm"] == arm and not row["rule"]])]
    top = NEAR * max(deepest, default=math.inf)
    shown = [value for value, _ in points.values() if value <= top]
    figure.update_yaxes(log_axis(shown), range=[math.log10(min(shown)) - 0.01, math.log10(max(shown)) + 0.01])
    far = [f"{way} ({number(value)})" for way, (value, _) in points.items() if value > top]
    note = _note(study, told) + (f" Off the scale: {', '.join(far)}." if far else "")
    return Panel("frontier", findings.frontier_finding(points, told[0].target), note, rows, figure)


def _row(arm: str, way: Way) -> dict[str, Any]:
    return {
        "arm": arm,
        "rule": way.rule,
        "loops": rounded(way.loops.mean, 6),
        "perplexity": rounded(way.perplexity.mean, 6),
        "standard_error": way.perplexity.rounded_error,
        "tokens_per_second": rounded(way.rate.mean, 6),
        "seeds": way.perplexity.n,
    }


def _note(study: StudyResults, told: Sequence[Exits]) -> str:
    """How exits were chosen and measured."""
    depths, targets = span([each.depth for each in told], str), span([each.target for each in told], "{:g}".format)
    runs = "" if len(told) == len(study.finished) else f" ({len(told)} of {len(study.finished)} runs)"
    old = [f"{run.name} ({run.exits.checkpoint})" for run in study.finished if run.exits and not of_the_end(run)]
    sequences = [each.measured.sequences for each in told if each.measured]
    parts = (
        ", ".join(dict.fromkeys(each.source for each in told if each.source)),
        f"checkpoint {', '.join(dict.fromkeys(each.checkpoint for each in told))}",
        f"{span(sequences, '{:,}'.format)} sequences" if sequences else "",
        ", ".join(dict.fromkeys(each.protocol for each in told if each.protocol)),
    )
    return (
        f"Lines: depths 1 to {depths}; hollow: exits by a rule whose threshold, of those that keep perplexity on other sequences"
        f" within {targets} × that of the last depth, is the fastest. Mean over seeds{runs}, bars: ± one standard error. On"
        f" {', '.join(filter(None, parts))}." + (f" Left out, not of the last step: {', '.join(old)}." if old else "")
    )
