"""A law of depths that a run has learned, taken as it ended: `depth.table: runs/NAME`."""

from __future__ import annotations

import json
from pathlib import Path


def law_of_run(run: Path) -> list[float]:
    """Probabilities of R = 1, 2, … that the run's last record has; below one in ten thousand they are cut.

    Raises :class:`ValueError` with a sentence where there are none."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{run} is no run folder: it has no metrics.jsonl")
    for line in reversed(metrics.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            law: list[float] = json.loads(line)["prior"]["probabilities"]
        except (ValueError, KeyError, TypeError):  # cut off by a kill, or of another kind
            continue
        return law
    raise ValueError(f"{run} has logged no law of its depths")
