"""Where a run's numbers go: metrics.jsonl (the truth), journal.jsonl, Weights & Biases, TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

Record = Mapping[str, Any]
"""One logged step; `telemetry` lists its keys."""


class Sink:
    """One place that numbers go to; a sink overrides what concerns it."""

    optional = True
    """An exception of an optional sink becomes one warning and switches it off; training goes on."""

    def start(self) -> None:
        """Open files and connections. Not in the constructor, so that a failure here is handled like any other."""

    def log(self, record: Record) -> None:
        """Take the record of one logged step."""

    def event(self, event: Record) -> None:
        """Take {time, kind, step, message}: something that happened beside the steps."""

    def advance(self, step: int) -> None:
        """Hear that ``step`` is done; called at every step, so it must be cheap."""

    def close(self) -> None:
        """Finish what was started."""


# --- files -----------------------------------------------------------------------------------------------------------


class MetricsLog(Sink):
    """metrics.jsonl: one record a line, flushed at once.

    On resume it is cut after the resumed step, so no step appears twice. Failing to write it is a failure of the run.
    """

    optional = False

    def __init__(self, path: Path, resumed_step: int = 0):
        self._path = path
        self._resumed_step = resumed_step

    def start(self) -> None:
        _keep_lines(self._path, lambda record: record.get("step", math.inf) <= self._resumed_step)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, record: Record) -> None:
        _write_line(self._file, record)

    def close(self) -> None:
        self._file.close()


class Journal(Sink):
    """journal.jsonl: one event a line, kept over resumes."""

    optional = False

    def __init__(self, path: Path):
        self._path = path

    def start(self) -> None:
        _keep_lines(self._path, lambda event: True)
        self._file = self._path.open("a", encoding="utf-8")

    def event(self, event: Record) -> None:
        _write_line(self._file, event)

    def close(self) -> None:
        self._file.close()


def _write_line(file: TextIO, entry: Record) -> None:
    file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file to its wanted lines; lines that a kill left half-written go too.

    The new file replaces the old in one rename: a kill in between leaves one of the two whole.
    """
    if not path.exists():
        return
    text = path.read_bytes().decode("utf-8", errors="replace")
    kept = "".join(f"{line}\n" for line in text.split("\n") if (entry := _parse(line)) is not None and wanted(entry))
    if kept == text:
        return
    temporary = path.with_suffix(".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


# --- trackers --------------------------------------------------------------------------------------------------------


class Tracker(Sink):
    """Weights & Biases; its files lie in the run folder, offline unless asked."""

    def __init__(self, folder: Path, run_id: str, mode: Literal["offline", "online"], project: str, config: Record):
        self._folder = folder
        self._run_id = run_id
        self._mode = mode
        self._project = project
        self._config = config

    def start(self) -> None:
        import wandb

        settings: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": 60}
        if "finish_timeout" in wandb.Settings.model_fields:  # newer releases: a lost service must not keep a job from ending
            settings["finish_timeout"] = 60
        self._run = wandb.init(
            project=self._project,
            name=self._folder.name,
            id=self._run_id,
            resume="allow",
            mode=self._mode,
            dir=self._folder,
            config=dict(self._config),
            settings=wandb.Settings(**settings),
        )
        # Our own x-axis: W&B drops what is logged at a step below its last, as after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        self._run.log({"step": record["step"], **scalars(record)})

    def close(self) -> None:
        self._run.finish()


class TensorBoard(Sink):
    """TensorBoard events; on resume, what was shown after the resumed step is purged."""

    def __init__(self, folder: Path, resumed_step: int = 0):
        self._folder = folder
        self._purge_step = resumed_step + 1 if resumed_step else None

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step, flush_secs=15)

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def scalars(record: Record) -> dict[str, float]:
    """A record as the flat numbers that trackers draw: lists by first and last entry, depths by mean, validation by depth,
    memory by kind on the rank that has most of it, busy by the ranks that have least and most, of an equilibrium its contraction,
    its errors by b and the share of tokens converged at last, of a scale the last loop's radial fraction, its single numbers and
    those of the clamp, and of other groups the numbers."""
    flat: dict[str, float | None] = {}
    for key, value in record.items():
        if key == "step" or value in (None, [], {}):
            continue
        if key == "depths":
            flat["depth"] = sum(value) / len(value)
        elif key == "busy":
            flat |= {"busy/least": min(value), "busy/most": max(value)}
        elif key == "memory":
            flat |= {f"memory/{kind}": max(ranks) for kind, ranks in value.items()}
        elif key == "equilibrium":
            flat |= {f"equilibrium/error_{b}": found["error"] for b, found in value.get("truncation", {}).items()}
            flat |= {"equilibrium/contraction": value.get("contraction"), "equilibrium/converged": value["converged"][-1]}
        elif key == "scale":
            flat |= {f"scale/{name}": value[name] for name in ("depth_gap", "token_correlation")}
            flat |= {f"scale/clamp_{name}": change for name, change in value.get("clamp", {}).items()}
            flat["scale/radial_fraction"] = value.get("radial_fraction", [None])[-1]
        elif key == "validation":
            flat |= {f"{key}/depth_{depth}": loss for depth, loss in value.items()}
        elif isinstance(value, Mapping):
            flat |= {f"{key}/{name}": number for name, number in value.items() if isinstance(number, float)}
        elif isinstance(value, list):
            flat |= {f"{key}/first": value[0], f"{key}/last": value[-1]}
        else:
            flat[key] = value
    return {name: value for name, value in flat.items() if value is not None}
