"""A ring plan as a picture: one row a stage, time to the right, colour by visit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from loopscale.errors import UsageError
from loopscale.parallel.ring.plan import Kind, Operation, Plan
from loopscale.plan.layout import stages_named
from loopscale.plan.timetable import Timed, idle_shares, timetable

Colour = tuple[float, float, float]

FORMATS = (".png", ".svg", ".pdf")
_GREYS: dict[Kind, tuple[str, Colour]] = {
    Kind.PRELUDE: ("prelude", (0.80, 0.80, 0.80)),
    Kind.EXIT: ("exit: loss and its gradient", (0.36, 0.36, 0.36)),
    Kind.PRELUDE_BACKWARD: ("prelude backward", (0.60, 0.60, 0.60)),
}
_IDLE: Colour = (0.99, 0.86, 0.83)
_BOUND: dict[str, Any] = {"color": "#b3202a", "linewidth": 1.3, "linestyle": (0, (4, 2))}
_BOX = 0.84
"""Height of a box; rows are 1 apart."""

# In inches
_ROW, _LEFT, _RIGHT, _TOP, _BOTTOM = 0.65, 1.2, 0.9, 0.6, 1.4
_NARROWEST, _WIDEST, _TYPICAL_BOX = 9.0, 18.0, 0.12
"""Limits of the axes' width, between which a median box is as wide as the last."""
_DIGIT, _POINTS = 0.058, 6
"""Width of a digit in a box, and its size in points."""


def draw(plan: Plan, path: Path, *, layer: float, slices: Sequence[int]) -> None:
    """Draws ``plan`` into ``path``, whose suffix is the format.

    ``layer``: the time of a core layer's forward, the unit of the picture; ``slices``: core layers of each stage.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--draw {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    figure(plan, layer, slices).savefig(path, dpi=150)


def figure(plan: Plan, layer: float, slices: Sequence[int]) -> Figure:
    """The picture, not yet in a file."""
    rows = [[Timed(o, start / layer, end / layer) for o, start, end in row] for row in timetable(plan)]
    length, deepest = plan.makespan / layer, max(work.depth for work in plan.work)
    # home's share of a visit costs nothing where it holds no core layer
    typical = median(timed.end - timed.start for timed in chain.from_iterable(rows) if timed.end > timed.start)
    width = min(max(_TYPICAL_BOX * length / typical, _NARROWEST), _WIDEST)
    height = _ROW * plan.stages
    page = Figure(figsize=(_LEFT + width + _RIGHT, _TOP + height + _BOTTOM))
    page.text(_LEFT / page.get_figwidth(), 1 - 0.32 / page.get_figheight(), _finding(plan), size=13, weight="bold", va="center")
    axes = _axes(page, _LEFT, _BOTTOM, width, height)
    for stage, row in enumerate(rows):
        _draw_row(axes, stage, row, deepest, inches=width / length)
    _draw_frame(axes, plan, length, slices)
    _draw_scale(_axes(page, _LEFT, 0.3, min(0.24 * deepest, 0.4 * width), 0.34), deepest)
    _draw_legend(page, axes)
    return page


def _axes(page: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place in inches."""
    across, up = page.get_figwidth(), page.get_figheight()
    return page.add_axes((left / across, bottom / up, width / across, height / up))


def _finding(plan: Plan) -> str:
    depths = sorted({work.depth for work in plan.work})
    depth = f"{depths[0]}" if len(depths) == 1 else f"{depths[0]}–{depths[-1]}"
    microbatches, stages = len(plan.work), plan.stages
    return (
        f"{microbatches} microbatch{'es' * (microbatches > 1)} of depth {depth} on {stages} stage{'s' * (stages > 1)}: "
        f"{plan.makespan / plan.lower_bound():.2f} × the bound, home idle {idle_shares(plan)[0]:.0%}"
    )


def _draw_row(axes: Axes, stage: int, row: Sequence[Timed], deepest: int, inches: float) -> None:
    """A stage's boxes, each with its microbatch where it is wide enough; ``inches`` per unit of time."""
    low, high = stage - _BOX / 2, stage + _BOX / 2
    boxes = [((t.start, low), (t.start, high), (t.end, high), (t.end, low)) for t in row]
    colours = [_colour(t.operation, deepest) for t in row]
    edge = min(0.5, 5 * inches * median(t.end - t.start for t in row))  # thin enough to leave narrow boxes their colour
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edge))
    for (operation, start, end), colour in zip(row, colours, strict=True):
        name = f"{operation.microbatch}"
        if inches * (end - start) > _DIGIT * (len(name) + 0.6):
            ink = "black" if _lightness(colour) > 0.45 else "white"
            axes.text((start + end) / 2, stage, name, size=_POINTS, color=ink, ha="center", va="center_baseline")


def _draw_frame(axes: Axes, plan: Plan, length: float, slices: Sequence[int]) -> None:
    """What surrounds the boxes: idle time, the bound, names of rows, their idle shares, the unit of time."""
    for stage, idle in enumerate(idle_shares(plan)):
        axes.broken_barh([(0, length)], (stage - _BOX / 2, _BOX), facecolors=[_IDLE], zorder=0)
        axes.text(1.006, stage, f"idle {idle:.1%}", size=9, va="center", transform=axes.get_yaxis_transform())
    axes.axvline(length * plan.lower_bound() / plan.makespan, **_BOUND)
    names = [f"{stages_named([s])}\n{layers} core layer{'s' * (layers != 1)}" for s, layers in enumerate(slices)]
    axes.set(xlim=(0, length), ylim=(plan.stages - 0.5, -0.5), yticks=range(plan.stages))
    axes.set_yticklabels(names, fontsize=9)
    axes.set_xlabel("time, in forwards of one core layer (counted operations); in the boxes, the microbatch", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_scale(axes: Axes, deepest: int) -> None:
    """Colours of the visits, forwards above backwards."""
    visits = range(1, deepest + 1)
    for line, kind in enumerate((Kind.VISIT, Kind.VISIT_BACKWARD)):
        colours = [_colour(Operation(kind, 0, r), deepest) for r in visits]
        axes.broken_barh([(r - 0.5, 1) for r in visits], (line, 1), facecolors=colours, edgecolors="white", linewidth=0.5)
    axes.set(xlim=(0.5, deepest + 0.5), ylim=(2, 0), yticks=(0.5, 1.5))
    axes.set_yticklabels(["visit, forward", "backward"], fontsize=9)
    every = -(-deepest // 16)
    axes.set_xticks([r for r in visits if r == 1 or r % every == 0])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _draw_legend(page: Figure, axes: Axes) -> None:
    handles: list[Artist] = [Patch(color=colour, label=name) for name, colour in _GREYS.values()]
    handles += [Patch(color=_IDLE, label="idle"), Line2D([], [], label="lower bound", **_BOUND)]
    corner = axes.get_position().x1, 0.15 / page.get_figheight()
    page.legend(handles=handles, ncols=3, loc="lower right", bbox_to_anchor=corner, fontsize=9, frameon=False)


def _colour(operation: Operation, deepest: int) -> Colour:
    """Greys for what happens once; a visit's hue goes with its number, and its backward is the darker of the two."""
    if operation.kind in _GREYS:
        return _GREYS[operation.kind][1]
    place = 0.0 if deepest == 1 else (operation.visit - 1) / (deepest - 1)
    red, green, blue, _ = colormaps["viridis"](0.05 + 0.87 * place)
    if operation.kind is Kind.VISIT:
        return _mixed((red, green, blue), (1.0, 1.0, 1.0), 0.45)
    return _mixed((red, green, blue), (0.0, 0.0, 0.0), 0.15)


def _mixed(colour: Colour, other: Colour, share: float) -> Colour:
    """``colour`` with ``share`` of ``other``."""
    red, green, blue = ((1 - share) * c + share * o for c, o in zip(colour, other, strict=True))
    return red, green, blue


def _lightness(colour: Colour) -> float:
    """Luma, 0 to 1."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue
