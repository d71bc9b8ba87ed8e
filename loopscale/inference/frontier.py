"""``loopscale eval --exits``: what early exit gains and costs, beside running every sequence to one depth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from loopscale.checkpoint.restore import Restored, restore
from loopscale.environment.compute import set_threads
from loopscale.errors import DataError, UsageError
from loopscale.evaluate.perplexity import perplexity
from loopscale.evaluate.run import PROTOCOL, held_out, microbatches, tell_broken, tell_notes, tracked, write
from loopscale.inference.exits import NEVER, TARGET, Rule, Score, calibrate, look, losses_of, rules, run
from loopscale.model.inputs import Inputs
from loopscale.model.stage import LoopedStage

ROUNDS = 3
"""Timed ones, after one that warms up."""

Way = tuple[int, Rule | None]
"""Depth, and the rule by which sequences may leave before."""


@dataclass(frozen=True)
class Part:
    """Sequences that are read for one purpose; ``tokens``: those that are scored."""

    sequences: int
    tokens: int

    @classmethod
    def of(cls, inputs: Sequence[Inputs]) -> Part:
        return cls(sum(len(each.tokens) for each in inputs), sum(int((each.targets >= 0).sum()) for each in inputs))


@dataclass(frozen=True)
class Point:
    """One way to leave the loop."""

    loss: float
    """Nats per scored token."""
    tokens_per_second: float
    """Of all tokens that are read."""
    exits: list[float]
    """Share of sequences that leave after visit 1, 2, … K."""

    @property
    def mean_loops(self) -> float:
        return sum(visit * share for visit, share in enumerate(self.exits, 1))


@dataclass(frozen=True)
class Frontier:
    """Depths 1 to K, and the rules with the thresholds that calibration gave them (:data:`NEVER`: none was good enough)."""

    checkpoint: str
    source: str
    protocol: str
    calibration: Part
    measured: Part
    fixed: dict[int, Point]
    rules: dict[str, Point]
    thresholds: dict[str, float]

    @property
    def depth(self) -> int:
        """K."""
        return max(self.fixed)

    def as_json(self) -> dict[str, Any]:
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "checkpoint": self.checkpoint,
            "source": self.source,
            "protocol": self.protocol,
            "depth": self.depth,
            "target": TARGET,
            "calibration": asdict(self.calibration),
            "measured": asdict(self.measured),
            "fixed": [
                {"depth": depth, "loss": point.loss, "tokens_per_second": point.tokens_per_second}
                for depth, point in self.fixed.items()
            ],
            "rules": {
                name: {
                    "threshold": None if self.thresholds[name] == NEVER else self.thresholds[name],
                    "loss": point.loss,
                    "tokens_per_second": point.tokens_per_second,
                    "mean_loops": point.mean_loops,
                    "exits": point.exits,
                }
                for name, point in self.rules.items()
            },
        }

    def table(self) -> Table:
        """80 columns suffice."""
        table = Table(
            title=f"{self.checkpoint} on {self.source}: {self.measured.sequences:,} sequences, {self.measured.tokens:,} tokens",
            caption=f"thresholds: {TARGET:g} × ppl@{self.depth} at most on {self.calibration.sequences:,} other sequences. "
            f"{self.protocol}",
        )
        for heading in ("exit", "ppl", f"× ppl@{self.depth}", "tok/s", "visits", f"% leave at 1–{self.depth}"):
            table.add_column(heading, justify="left" if heading == "exit" else "right")
        deepest = self.fixed[self.depth].loss

        def row(name: str, point: Point, shares: str) -> None:
            numbers = (
                f"{perplexity(point.loss):.2f}",
                f"{perplexity(point.loss - deepest):.4f}",
                f"{point.tokens_per_second:,.0f}",
            )
            table.add_row(name, *numbers, f"{point.mean_loops:.2f}", shares)

        for depth, point in self.fixed.items():
            row(f"depth {depth}", point, "")
        table.add_section()
        for name, point in self.rules.items():
            threshold = self.thresholds[name]
            reached = ", never" if threshold == NEVER else f" ≤ {-threshold:.3g}" if name == "kl" else f" ≥ {threshold:.3g}"
            row(name + reached, point, " ".join(f"{100 * share:.0f}" for share in point.exits))
        return table


def frontier(where: str | Path, *, text: Path | None = None, sequences: int | None = None, batch: int = 16) -> Frontier:
    """Calibrates early exit on the first half of the held-out sequences, and measures it and the fixed depths up to the
    evaluation depth on the other half; prints a table and writes ``RUN/evaluations/*-exits.json``.

    Raises :class:`UsageError` for a model without a loop and for fewer than two sequences."""
    restored = restore(where)
    threads = set_threads(None, 1)
    depth = restored.config.depth.evaluation_depth
    if depth == 1:
        raise UsageError(f"--exits needs a loop to leave early, and {where} is evaluated at depth 1")
    samples, source = held_out(restored, text, sequences)
    half = len(samples) // 2
    if not half:
        raise UsageError("--exits needs two sequences at least, one to calibrate and one to measure; there is one")
    console = Console()
    tell_notes(restored, console)
    calibration, measured = (
        list(microbatches(restored, part, batch, first)) for part, first in ((samples[:half], 0), (samples[half:], half))
    )
    parts = Part.of(calibration), Part.of(measured)
    if not all(part.tokens for part in parts):
        raise DataError(f"half of what was read of {source} holds no token to score; let --exits read more sequences")
    scores = rules(restored.config.model)
    thresholds = _calibrated(restored, calibration, depth, scores, parts[0].tokens, console)
    ways: list[Way] = [(k, None) for k in range(1, depth + 1)]
    ways += [(depth, Rule(scores[name], threshold)) for name, threshold in thresholds.items()]
    points = measure(restored.stage, measured, ways, console)
    device = restored.mesh.device.type
    timed_on = f"cpu, {threads} thread{'s' * (threads > 1)}" if device == "cpu" else device
    found = Frontier(
        restored.checkpoint,
        source,
        f"{PROTOCOL}; sequences leave whole, after the first visit whose score, a mean over all their tokens (kl: −KL), reaches "
        f"a threshold that the other half of the sequences set; tokens/s from tokens to logits, scoring included, {batch} "
        f"sequences at a time, median of {ROUNDS} rounds, {timed_on}",
        *parts,
        fixed=dict(enumerate(points[:depth], 1)),
        rules=dict(zip(thresholds, points[depth:], strict=True)),
        thresholds=thresholds,
    )
    console.print(found.table())
    tell_broken(restored, (point.loss for point in points), console)
    write(restored, "exits" if text is None else f"exits-text-{text.name}", found.as_json(), console)
    return found


def _calibrated(
    restored: Restored, inputs: Sequence[Inputs], depth: int, given: Mapping[str, Score], tokens: int, console: Console
) -> dict[str, float]:
    """The threshold of each rule."""
    losses: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {name: [] for name in given}
    for each in tracked(inputs, "calibrating", len(inputs), console):
        lost, scored = look(restored.stage, each, depth, given)
        restored.stage.finished(each)
        losses.append(lost)
        for name, own in scored.items():
            scores[name].append(own)
    return {name: calibrate(torch.cat(own, 1), torch.cat(losses, 1), tokens) for name, own in scores.items()}


def measure(stage: LoopedStage, microbatches: Sequence[Inputs], ways: Sequence[Way], console: Console) -> list[Point]:
    """Each way over the same microbatches. All take turns at every microbatch, so that whatever else the machine does meets
    them alike; a microbatch takes the median of its rounds."""
    seconds = torch.zeros(1 + ROUNDS, len(microbatches), len(ways), dtype=torch.float64)
    losses = torch.zeros(len(ways), dtype=torch.float64)
    left = torch.zeros(len(ways), max(depth for depth, _ in ways), dtype=torch.float64)
    steps = [(turn, number) for turn in range(1 + ROUNDS) for number in range(len(microbatches))]
    for turn, number in tracked(steps, "measuring", len(steps), console):
        inputs = microbatches[number]
        for i, way in enumerate(ways):
            begun = _now(inputs)
            parts = list(run(stage, inputs, *way))
            seconds[turn, number, i] = _now(inputs) - begun
            stage.finished(inputs)
            for part in parts if turn == 0 else ():
                losses[i] += losses_of(part.logits, inputs.targets[part.rows]).sum().cpu()
                left[i, part.visit - 1] += len(part.rows)
    whole, read = Part.of(microbatches), sum(each.tokens.numel() for each in microbatches)
    rates = read / seconds[1:].median(0).values.sum(0)
    return [
        Point(loss / whole.tokens, rate, exits)
        for loss, rate, exits in zip(losses.tolist(), rates.tolist(), (left / whole.sequences).tolist(), strict=True)
    ]


def _now(inputs: Inputs) -> float:
    """Seconds, when all that was asked of the device is done."""
    if inputs.tokens.is_cuda:
        torch.cuda.synchronize(inputs.tokens.device)
    return time.perf_counter()
