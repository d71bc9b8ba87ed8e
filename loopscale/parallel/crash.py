"""The file that the first rank that fails leaves in the run's folder: what happened, and where in the code."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopscale.durable import write_json

NAME = "crash.json"


def write(folder: Path, facts: Mapping[str, Any], error: BaseException) -> Path | None:
    """Writes ``facts``, the rank among them, and the traceback of ``error``, unless there is such a file. None where that
    fails too, for want of disk or memory say: the error itself matters more.

    Ranks that have lost contact to each other may all be first: each then writes a whole file, and one of them stays.
    """
    path = folder / NAME
    try:
        if not path.exists():
            own = folder / f"{NAME}.rank-{facts['rank']}"
            write_json(own, {**facts, "traceback": _lines(error)})
            own.replace(path)
    except Exception:
        return None
    return path


def set_aside(folder: Path) -> None:
    """Renames the file of an earlier start of the run to crash-N.json."""
    if (folder / NAME).exists():
        names = (folder / f"crash-{n}.json" for n in itertools.count(1))
        (folder / NAME).rename(next(name for name in names if not name.exists()))


def _lines(error: BaseException | None) -> list[str]:
    """The whole traceback, causes first, those too that a sentence stands for."""
    chain = list[BaseException]()
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return [line for each in reversed(chain) for line in "".join(traceback.format_exception(each, chain=False)).splitlines()]
