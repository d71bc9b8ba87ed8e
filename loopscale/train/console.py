"""What a run shows on the console."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from loopscale.train.sinks import Record, Sink


class ConsoleLine(Sink):
    """One line per logged step and event; on a terminal a live bar stays below them.

    Args:
        steps: Steps of the whole run.
        width: Model width d; the state is shown by its root mean square, L2 norm / sqrt(d).
    """

    def __init__(self, console: Console, steps: int, width: int):
        self._console = console
        self._steps = steps
        self._width = width
        self._first: tuple[int, float] | None = None  # step and seconds at this session's first record: pace counts from here
        self._bar: Progress | None = None

    def start(self) -> None:
        if self._console.is_terminal:
            count = TextColumn("{task.completed:,}/{task.total:,}  {task.description}")
            self._bar = Progress(BarColumn(bar_width=None), count, console=self._console, transient=True, expand=True)
            self._task = self._bar.add_task("", total=self._steps)
            self._bar.start()

    def log(self, record: Record) -> None:
        times = [f"{_duration(record.get('elapsed'))} elapsed", f"{_duration(self._left(record))} left"]
        rate = f"{_count(record.get('tokens_per_s'))} tok/s"
        line = Text(f" step {record['step']:>5}/{self._steps} {record['step'] / self._steps:>4.0%}")
        for label, value in [*self._fields(record), ("", rate), *_share(record), *(("", time) for time in times)]:
            field = Text.assemble("  ", (f"{label} " if label else "", "dim"), (value, "bold" if label == "loss" else ""))
            # A narrow terminal loses fields from the right; rate and times are on the bar as well.
            if self._bar is not None and line.cell_len + field.cell_len > self._console.width:
                break
            line.append_text(field)
        self._print(line)
        if record.get("validation"):
            self._print(_validation(record))
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description="  ".join([rate, *times]))

    def event(self, event: Record) -> None:
        if event["kind"] == "warning":
            self._print(Text(f"! {event['message']}", style="yellow"))
        elif event["kind"] == "start":  # the banner, laid out by whoever wrote it
            self._print(Text(event["message"]))
        else:
            self._print(Text.assemble((f" {event['kind']:<6} ", "dim"), event["message"]))

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)

    def _fields(self, record: Record) -> list[tuple[str, str]]:
        """(label, value) of what matters most."""
        norms = record.get("state_norm") or [None]
        depths = record.get("depths") or []
        fields = [
            ("loss", _number(record.get("loss"), ".3f")),
            ("ppl", _perplexity(record.get("perplexity"))),
            ("depth", _number(sum(depths) / len(depths) if depths else None, ".1f")),
            ("|h|", _number(root_mean_square(norms[-1], self._width), ".2f")),
            ("grad", _number(record.get("grad_norm"), ".2f")),
        ]
        return [*fields, ("skipped", str(record["skipped"]))] if record.get("skipped") else fields

    def _left(self, record: Record) -> float | None:
        """Seconds to go at this session's pace: before a resume it may have run on another machine."""
        step: int = record["step"]
        elapsed: float | None = record.get("elapsed")
        if elapsed is None:
            return None
        if self._first is None:
            self._first = (step, elapsed)
        steps, seconds = step - self._first[0], elapsed - self._first[1]
        if steps <= 0:
            steps, seconds = step, elapsed
        return (self._steps - step) * seconds / steps


def _share(record: Record) -> list[tuple[str, str]]:
    share = record.get("matmul_share")
    return [] if share is None else [("mm", f"{share:.0%}")]


def _validation(record: Record) -> Text:
    line = Text(f" val  {record['step']:>5}  ppl")
    for depth, loss in record["validation"].items():
        perplexity = None if loss is None else math.exp(min(loss, 700))  # exp(710) overflows
        line.append_text(Text.assemble((f"@{depth} ", "dim"), _perplexity(perplexity), "  "))
    line.rstrip()
    return line


def root_mean_square(norm: float | None, width: int) -> float | None:
    """Root mean square of the ``width`` entries of a vector with L2 norm ``norm``."""
    return None if norm is None else norm / math.sqrt(width)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _perplexity(value: float | None) -> str:
    """With one decimal; that of a diverged model has hundreds of digits."""
    return _number(value, ".1f" if value is None or value < 1e6 else ".1e")


def _count(value: float | None) -> str:
    """2.9k, 1.31M."""
    if value is None:
        return "–"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999,600 is 1M, not 1000k
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def _duration(seconds: float | None) -> str:
    """h:mm:ss, or days and hours."""
    if seconds is None:
        return "–"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}d {hours % 24}h" if hours >= 48 else f"{hours}:{minute:02}:{second:02}"
