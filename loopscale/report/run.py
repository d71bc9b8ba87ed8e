"""Reading a run folder: what training and evaluation left there, whole or not."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from loopscale.errors import UsageError
from loopscale.report.exits import Exits

Entry = dict[str, Any]

HELD_OUT_EXITS = re.compile(r"step-[0-9]+-exits\.json")
EXITS = re.compile(r"step-[0-9]+-exits(-text-.+)?\.json")
"""Of evaluations of early exit, also those of a text of its own."""


@dataclass(frozen=True)
class Run:
    """A run folder's content; what a young or broken-off run lacks is empty."""

    name: str
    records: list[Entry]
    """metrics.jsonl: one object per logged step, steps rising. Numbers that are not finite are None, here and below."""
    events: list[Entry] = field(default_factory=list)
    """journal.jsonl."""
    config: Entry = field(default_factory=dict)
    manifest: Entry = field(default_factory=dict)
    evaluation: Entry | None = None
    """The newest of evaluations/*.json that went through depths."""
    exits: Exits | None = None
    """That of the newest checkpoint among evaluations/*-exits.json."""
    unreadable: list[str] = field(default_factory=list)
    """Files that could not be read and are left out."""

    def about(self, key: str) -> Entry:
        """One part of the manifest; empty when unknown."""
        return self.manifest.get(key) or {}

    @property
    def depth(self) -> int | None:
        """The depth that numbers are quoted at: the prior's mean, rounded as for evaluation."""
        mean = self.about("prior").get("mean") or (self.config.get("depth") or {}).get("mean")
        return round(mean) if mean else None

    @property
    def width(self) -> int | None:
        """Entries of one token's state."""
        width: int | None = (self.config.get("model") or {}).get("hidden_size")
        return width

    def validation_depth(self) -> str | None:
        """The validated depth to show: `depth`, or where that was not asked for, the best at the last validation."""
        validated = [record["validation"] for record in self.records if record.get("validation")]
        if not validated:
            return None
        last = {depth: loss for depth, loss in validated[-1].items() if loss is not None}
        return str(self.depth) if str(self.depth) in last else min(last, key=lambda depth: last[depth], default=None)


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        UsageError: it is no run folder.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UsageError(f"{folder} is not a run folder: it has no metrics.jsonl; give one such as runs/NAME")
    unreadable: list[str] = []

    def read(path: Path) -> Entry:
        """A JSON or YAML object; empty when there is no such file or it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
            entry = yaml.safe_load(text) if path.suffix == ".yaml" else _parse(text)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError, yaml.YAMLError):
            entry = None
        if not isinstance(entry, dict):
            unreadable.append(str(path.relative_to(folder)))
            return {}
        return entry

    def read_exits(path: Path) -> Exits | None:
        entry = read(path)
        try:
            return Exits.model_validate(entry) if entry else None
        except ValueError:
            unreadable.append(str(path.relative_to(folder)))
            return None

    paths = sorted((folder / "evaluations").glob("*.json"))
    exits = [found for path in paths if HELD_OUT_EXITS.fullmatch(path.name) and (found := read_exits(path))]
    evaluations = [read(path) for path in paths if not EXITS.fullmatch(path.name)]
    manifest = read(folder / "manifest.json")
    return Run(
        name=manifest.get("name") or folder.resolve().name,
        records=[record for record in _read_lines(metrics) if "step" in record],
        events=_read_lines(folder / "journal.jsonl"),
        config=read(folder / "config.yaml"),
        manifest=manifest,
        evaluation=max(
            (each for each in evaluations if {"depths", "loss", "perplexity"} <= each.keys()),
            key=lambda each: each.get("created") or "",
            default=None,
        ),
        exits=max(exits, key=lambda each: each.age, default=None),
        unreadable=unreadable,
    )


def _read_lines(path: Path) -> list[Entry]:
    """The objects of a JSONL file; a line that is being written, or was when a run was killed, is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            entries.append(_parse(line))
        except ValueError:
            continue
    return [entry for entry in entries if isinstance(entry, dict)]


def _parse(text: str) -> Any:
    """JSON, with None for the NaN and Infinity that Python writes there."""
    return json.loads(text, parse_constant=lambda name: None)
