"""``--profile``: a few steps under torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

_WAIT, _WARM_UP, _ACTIVE = 2, 1, 3


@contextlib.contextmanager
def profiler(folder: Path, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after every step.

    Steps 4 to 6 are recorded: ``profile/trace.json`` (for a trace viewer) and ``profile/operators.txt``, by own time.
    """
    if not enabled:
        yield lambda: None
        return
    from torch.profiler import profile, schedule

    place = folder / "profile"
    place.mkdir(parents=True, exist_ok=True)

    def write(recorded: profile) -> None:
        recorded.export_chrome_trace(str(place / "trace.json"))
        table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        (place / "operators.txt").write_text(table)

    plan = schedule(wait=_WAIT, warmup=_WARM_UP, active=_ACTIVE, repeat=1)
    with profile(schedule=plan, on_trace_ready=write, profile_memory=True) as running:
        yield running.step
