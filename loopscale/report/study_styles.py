"""How the arms of a study are told apart in all of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loopscale.report.study import Arm, StudyResults

ROLES = 8
"""Colours for arms in the style sheet; with more arms they come again, dashed."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "cross")

Style = dict[str, Any]


def styles(study: StudyResults) -> Iterator[tuple[Arm, Style]]:
    """Each arm with what marks it in all figures: place in the file, not among the finished, so that it keeps its colour."""
    order = list(study.changes)
    for arm in study.arms:
        place = order.index(arm.name)
        yield (
            arm,
            {
                "name": arm.name,
                "meta": f"arm-{place % ROLES + 1}",
                "marker_symbol": SYMBOLS[place % ROLES],
                "line_dash": "solid" if place < ROLES else "dot",
            },
        )
