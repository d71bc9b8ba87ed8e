"""One figure of a page, and what all figures share.

No colour is set here. A trace's ``meta`` names its role; the page colours roles by its style sheet, light or dark.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Sized
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go


@dataclass(frozen=True)
class Panel:
    """One figure of the page."""

    key: str
    title: str
    """The finding."""
    note: str
    """What is drawn and how it was measured."""
    rows: list[dict[str, Any]]
    """What is drawn, as a table."""
    figure: go.Figure | None
    """None when there is nothing to draw; the note then says what would make it."""

    def csv(self) -> str:
        """The rows as CSV; a gap is an empty cell."""
        out = io.StringIO()
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()


def empty_figure(x: str, y: str, loops: int = 0) -> go.Figure:
    """An empty figure in the page's layout; ``loops``: the largest of an x axis that counts loops."""
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(),  # the page's own look, not plotly's
        xaxis_title_text=x,
        yaxis_title_text=y,
        margin={"l": 54, "r": 12, "t": 8, "b": 40},
        hovermode="x unified",
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        bargap=0.25,
    )
    figure.update_xaxes(showgrid=False, title_standoff=6)
    figure.update_yaxes(title_standoff=8)
    if loops:
        figure.update_xaxes(loop_ticks(loops))
    return figure


def loop_ticks(loops: int) -> dict[str, Any]:
    """Of an axis that counts loops up to ``loops``."""
    dtick = 1 if loops <= 20 else 5 if loops <= 60 else 10
    return {"tick0": 1 if dtick == 1 else 0, "dtick": dtick, "tickformat": "d", "hoverformat": "d"}


def mode(points: Sized) -> str:
    """One point alone makes no line."""
    return "lines" if len(points) > 1 else "markers"


def log_axis(values: Collection[float]) -> dict[str, Any]:
    """Of a logarithmic axis that ``values``, all above zero, are read on."""
    ticks = log_ticks(min(values), max(values))
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


def log_ticks(low: float, high: float) -> list[float]:
    """Round values between ``low`` and ``high``, about as many as an axis has room for."""
    if 1 < high / low < 2:
        size = 10.0 ** math.floor(math.log10(high - low))
        step = next(s * size for s in (1, 2, 5, 10) if (high - low) / (s * size) <= 6)
        return [round(i * step, 12) for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 30 else (1, 3) if high / low < 1e4 else (1,)
    return [step * 10.0**decade for decade in decades for step in steps]
