"""What a run tells: every sink of records and events, and one place that fans them out.

The rank that logs holds `Telemetry.open(…)`, every other rank an empty `Telemetry()`. A *record* is one JSON-able
dict per logged step; its keys (those left out are simply not shown):

    step, tokens, skipped      optimizer steps, tokens trained on and steps skipped, all since the run began
    loss, perplexity, lr, grad_norm, tokens_per_s
    elapsed                    seconds of this run, those before a resume included
    matmul_share               matrix products' share of the step's arithmetic peak, or None
    depths                     the depth drawn by each group
    prior                      {mean, entropy (nats), probabilities of R = 1, 2, …} of the law that the next step draws from;
                               where it is learned, feedback_snr: the power of signal over that of noise in its gradient
    state_norm, state_norm_p99, state_change    one number per loop; norms are L2 over the width
    state_converged            share of tokens by loop whose state changed by less than 3%, beside state_change
    validation                 {depth: held-out loss}, where a validation was due
    equilibrium                where a diagnosis was due, on held-out sequences at the evaluation depth R: {"depth": R,
                               "contraction": spectral radius of a visit at the fixed point (one pipeline stage alone),
                               "truncation": {b: {"error": ‖g_b − g_R‖ / ‖g_R‖, "cosine"}} of the gradient of b visits (none
                               without injection), "change" and "converged": as state_change and state_converged, to 2 R}
    scale                      beside equilibrium; lists are by loop, 1 to R: {"depth": R, "norms": {mean, median, p99, max, std,
                               edges and counts of a histogram}, "radial_fraction": |⟨g, h⟩| / (‖g‖ ‖h‖) of each loop's own loss
                               (none where the gate alone is trained), "motion": {growth, angle, and both to first order in
                               1/norm: growth_predicted, angle_predicted}, "loss" at R, "depth_gap": perplexity at depth 1 over
                               that at R, "scaled_loss": {factor on the final state: loss}, "clamp": {"rms", "radial": change
                               of the loss with tokens held at the RMS of loop 1, or moved without their radial part (one
                               pipeline stage alone)}, "token_correlation": mean cosine between a sequence's final states}
    busy                       seconds a step that each rank did not wait for others, on average since the last record; what
                               ranks exchange inside layers and in the optimizer's step counts as work of all of them
    memory                     {kind: bytes of each rank}; the kinds are those of `diagnostics.memory`
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loopscale.config.tree import Config
from loopscale.durable import finite
from loopscale.train.console import ConsoleLine
from loopscale.train.sinks import Journal, MetricsLog, Record, Sink, TensorBoard, Tracker


class Telemetry:
    """Tells every sink of each record and event."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self._sinks = list(sinks)
        self._step = 0
        self._tell("start")

    @classmethod
    def open(
        cls, folder: Path, config: Config, *, run_id: str, resumed_step: int = 0, console: Console | None = None
    ) -> Telemetry:
        """All sinks of the run in ``folder``.

        Args:
            run_id: Names the run to its tracker. Made once by `new_run_id` and kept in checkpoints, so that a resumed
                run goes on as the same one.
            resumed_step: The step of the checkpoint that training goes on from; what was logged after it is forgotten.
        """
        console = console or Console()
        sinks = [
            MetricsLog(folder / "metrics.jsonl", resumed_step),
            Journal(folder / "journal.jsonl"),
            ConsoleLine(console, config.train.steps, config.model.hidden_size),
        ]
        if config.log.tensorboard:
            sinks.append(TensorBoard(folder / "events", resumed_step))
        if config.log.wandb != "disabled":
            settings = config.model_dump(mode="json")
            sinks.append(Tracker(folder, run_id, config.log.wandb, config.log.wandb_project, settings))
        return cls(sinks)

    def log(self, record: Record) -> None:
        """Tell the record of one logged step. Values that are not finite are told as None: JSON has no NaN."""
        self._step = record["step"]
        self._tell("log", finite(record))

    def event(self, kind: str, step: int, message: str) -> None:
        """Tell that something happened: ``kind`` is resumed, skipped, rewound, saved, warning, …"""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._tell("event", {"time": now, "kind": kind, "step": step, "message": message})

    def advance(self, step: int) -> None:
        """Tell that ``step`` is done; moves the progress bar."""
        self._step = step
        self._tell("advance", step)

    def close(self) -> None:
        """Close the sinks, last opened first: the journal still takes the warning of a tracker that cannot finish."""
        for sink in reversed(list(self._sinks)):
            self._call(sink, "close")
            if sink in self._sinks:
                self._sinks.remove(sink)

    def _tell(self, method: str, *arguments: Any) -> None:
        for sink in list(self._sinks):
            self._call(sink, method, *arguments)

    def _call(self, sink: Sink, method: str, *arguments: Any) -> None:
        if sink not in self._sinks:  # switched off meanwhile, by a warning about another
            return
        try:
            getattr(sink, method)(*arguments)
        except Exception as error:
            if not sink.optional:
                raise
            self._sinks.remove(sink)
            cause = str(error).strip().split("\n")[0] or type(error).__name__
            message = f"{type(sink).__name__} is off for the rest of this run; metrics.jsonl goes on ({cause})"
            self.event("warning", self._step, message)


def new_run_id() -> str:
    """An id for a new run's tracker."""
    return secrets.token_hex(4)
