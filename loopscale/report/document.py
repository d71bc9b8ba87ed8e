"""A report page: one self-contained HTML file out of figures, tables and plotly's own script."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from loopscale.durable import replacing
from loopscale.errors import UsageError
from loopscale.report.panel import Panel


def write(path: Path, page: str) -> Path:
    """Write a page; returns its path. Raises :class:`UsageError` where no file can have it."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is {'a folder' if path.is_dir() else 'no plain file'}; name a file for the page, as page.html")
    if not path.parent.is_dir():
        raise UsageError(f"{path} is in no folder that exists; make {path.parent}, or name another")
    with replacing(path) as file:  # someone may have the page of a running training open
        file.write(page.encode())
    return path


def document(name: str, summary: str, origin: str, panels: Sequence[Panel], sections: Iterable[str]) -> str:
    """The whole page; ``summary`` and ``sections`` are HTML, all else is text."""
    specs = {panel.key: panel.figure.to_plotly_json() for panel in panels if panel.figure}
    tables = {panel.key: panel.csv() for panel in panels if panel.rows}
    return Template(_asset("page.html")).substitute(
        name=escape(name),
        summary=summary,
        origin=escape(origin),
        figures="\n".join(_figure(panel, name) for panel in panels),
        sections="\n".join(sections),
        style=_asset("style.css"),
        data=pack(json.dumps({"figures": specs, "tables": tables}, allow_nan=False, separators=(",", ":"))),
        plotly=_packed_plotly(),
        script=_asset("page.js"),
    )


def pack(text: str) -> str:
    """Text, gzipped, in base 85; page.js unpacks it.

    Plotly's script alone is 4.8 MB, and 1.96 MB when gzipped and in base 64. The digits are those of RFC 1924 but for "<",
    which could begin a tag or a comment: a comma stands for it.
    """
    return base64.b85encode(gzip.compress(text.encode(), mtime=0)).decode().replace("<", ",")


@cache
def _packed_plotly() -> str:
    return pack(get_plotlyjs())


def _figure(panel: Panel, page_name: str) -> str:
    """One figure with its finding, note and CSV."""
    key, title, note = escape(panel.key), escape(panel.title), escape(panel.note)
    if panel.figure:
        body = f'<div class="plot" id="plot-{key}" data-figure="{key}" role="img" aria-label="{title}"></div>'
    else:
        body = '<div class="plot empty" aria-hidden="true">nothing to draw yet</div>'
    csv = f'<a class="csv" download="{escape(page_name)}-{key}.csv" data-table="{key}">CSV</a>' if panel.rows else ""
    return f"<figure><figcaption><h2>{title}</h2></figcaption>{body}<footer><p>{note}</p>{csv}</footer></figure>"


def _asset(name: str) -> str:
    return resources.files("loopscale.report").joinpath(name).read_text(encoding="utf-8")
