"""The tables below the figures: speed, memory, data, environment, events, configuration."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any

import yaml

from loopscale.report.findings import number
from loopscale.report.run import Run


def sections(run: Run) -> Iterator[str]:
    """The sections as HTML, in their order on the page."""
    yield section("Throughput", pairs(_throughput(run)))
    yield section("Memory and size", _memory(run))
    yield section("Data", pairs(run.about("corpus")))
    yield section("Environment", pairs(_environment(run)))
    yield section("Events", _events(run), wide=True)
    yield section("Configuration", _config(run.config, run.about("origins")), wide=True)


def section(title: str, body: str, wide: bool = False) -> str:
    body = body or '<p class="none">Nothing recorded.</p>'
    return f"<section{' class=wide' if wide else ''}><h2>{escape(title)}</h2>{body}</section>"


def _throughput(run: Run) -> dict[str, Any]:
    """How fast it ran, and how much of the time went into matrix products."""
    rates = [record["tokens_per_s"] for record in run.records if record.get("tokens_per_s")]
    shares = [record["matmul_share"] for record in run.records if record.get("matmul_share") is not None]
    elapsed = [record["elapsed"] for record in run.records if record.get("elapsed") is not None]
    rows: dict[str, Any] = {}
    if rates:
        rows["tokens per second, median"] = number(statistics.median(rates))
        rows["slowest and fastest logged"] = f"{number(min(rates))} and {number(max(rates))}"
    if shares:
        share = statistics.median(shares)
        rows["time in matrix products at full rate"] = f"{share:.0%}"
        rows["time in all else"] = f"{max(0, 1 - share):.0%}"
    if elapsed:
        rows["training time"] = str(timedelta(seconds=round(elapsed[-1])))
    if run.records:
        rows["steps skipped"] = run.records[-1].get("skipped", 0)
    return rows


def _memory(run: Run) -> str:
    """Parameter counts, and memory by kind."""
    sizes = {f"parameters, {key.replace('_', ' ')}": value for key, value in run.about("parameters").items()}
    return pairs(sizes) + _memory_by_kind(run)


def _memory_by_kind(run: Run) -> str:
    """What the heaviest rank of each stage held when it held most, beside what was predicted; GiB."""
    logged = [record["memory"] for record in run.records if isinstance(record.get("memory"), Mapping)]
    if not logged:
        return ""
    about = run.about("memory")
    stages: list[int] = about.get("stages") or [0] * len(logged[0]["peak"])
    predicted: list[dict[str, int]] = about.get("predicted") or []
    rows = []
    for stage in sorted(set(stages)):
        own = [(kinds, rank) for kinds in logged for rank in range(len(kinds["peak"])) if stages[rank] == stage]
        kinds, rank = max(own, key=lambda each: each[0]["peak"][each[1]])
        for kind, ranks in kinds.items():
            if ranks[rank]:
                expected = f"{predicted[stage][kind] / 2**30:.3f}" if stage < len(predicted) else ""
                rows.append([f"{stage} (rank {rank})", kind.replace("_", " "), f"{ranks[rank] / 2**30:.3f}", expected])
    return table(("stage", "memory, GiB", "measured", "predicted"), rows)


def _environment(run: Run) -> dict[str, Any]:
    """Layout, machine, revision and versions. The diff of a dirty checkout stays in the manifest: it may be long."""
    git = {key: value for key, value in run.about("git").items() if key != "diff"}
    parts = {"layout": run.about("layout"), "machine": run.about("machine"), "git": git}
    rows = {f"{part} {key}": value for part, values in parts.items() for key, value in values.items()}
    if command := run.manifest.get("command"):
        rows["command"] = shlex.join(command)
    return rows | {f"{name} version": version for name, version in run.about("versions").items()}


def _events(run: Run) -> str:
    rows = [[moment(event.get("time")), *(event.get(key, "") for key in ("kind", "step", "message"))] for event in run.events]
    rows += [["", "report", "", f"{name} cannot be read and is left out"] for name in run.unreadable]
    return table(("time", "kind", "step", "what happened"), rows)


def _config(config: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """A table for each section of the config, with the layer that each value came from where that is known."""
    tables = []
    for name, values in config.items():
        settings = values.items() if isinstance(values, Mapping) else [("", values)]
        rows = []
        for key, value in settings:
            dotted = f"{name}.{key}" if key else name
            rows.append([dotted, _yaml(value), *([origins.get(dotted, "default")] if origins else [])])
        tables.append(table((name, "", *(("from",) if origins else ())), rows))
    return f'<div class="columns">{"".join(tables)}</div>' if tables else ""


def pairs(rows: Mapping[str, Any]) -> str:
    """A table of two columns; large whole numbers get thousands separators."""
    return table((), [[key, f"{value:,}" if type(value) is int and value >= 10_000 else value] for key, value in rows.items()])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    header = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{header}<tbody>{body}</tbody></table>"


def moment(time: Any) -> str:
    """An ISO time as people read it; all of ours are in UTC."""
    return str(time or "").replace("T", " ").replace("+00:00", " UTC")


def _yaml(value: Any) -> str:
    """A value as YAML would write it on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
