"""Reading what a run tells: journal.jsonl and metrics.jsonl. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without lines that a kill or a full disk left damaged; none where there is no file."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
                found.append(entry)
    return found


def last_saved(run: Path) -> int:
    """The last step that the run's journal says was saved; 0 if none was."""
    return max((event["step"] for event in read_lines(run / "journal.jsonl") if event.get("kind") == "saved"), default=0)


def last_record(run: Path, tail: int = 1 << 16) -> dict[str, Any]:
    """The last record of the run's metrics, empty if there is none; reads the file's end only."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - tail, 0))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # cut off, by the reading here or by a kill
            if isinstance(entry := json.loads(line), dict):
                return entry
    return {}
