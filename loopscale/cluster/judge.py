"""Which nodes of a job are sick, from what their ranks found. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loopscale.config.cluster import PreflightConfig

_GB = 1e9


@dataclass(frozen=True)
class Facts:
    """What one rank found. Rates are operations and bytes per second; None where they were not measured."""

    host: str
    versions: Mapping[str, str]
    code: str
    """Digest of loopscale's own files."""
    disk: float
    shm: float
    sees_run: bool
    address: str
    problems: Sequence[str] = ()
    """What is wrong by itself, whatever the other ranks say."""
    clock: float = 0.0
    """Seconds ahead of rank 0."""
    matmul: float | None = None
    received: float | None = None
    """Bytes per second from the node before, on each node's first rank."""


@dataclass(frozen=True)
class Verdict:
    """``sick`` nodes, each with what is wrong; ``refused`` says why nothing can be started."""

    sick: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: str | None = None


def judge(
    nodes: Sequence[str], devices: int, facts: Mapping[int, Facts], missing: Mapping[int, str], settings: PreflightConfig
) -> dict[str, list[str]]:
    """What is wrong with each sick node. ``facts`` of the ranks that came, ``missing`` ranks with what is known of them; rank r
    is of node r // devices. Rank 0, which asks, has come."""
    sick: dict[str, list[str]] = {}

    def complain(rank: int, sentence: str) -> None:
        said = sick.setdefault(nodes[rank // devices], [])
        if sentence not in said:
            said.append(sentence)

    for rank, known in missing.items():
        complain(rank, f"rank {rank} has not come within {settings.timeout} s" + (f": {known}" if known else ""))
    first = facts[0]
    for rank, found in facts.items():
        for sentence in found.problems:
            complain(rank, sentence)
        for package, version in found.versions.items():
            if version != first.versions[package]:
                complain(rank, f"{package} is {version} here and {first.versions[package]} on {first.host}")
        if found.code != first.code:
            complain(rank, f"loopscale's files differ from those on {first.host}")
        if not found.sees_run:
            complain(rank, "the run's folder is not the one that the job was launched from; it must be on a shared disk")
        if abs(found.clock) > settings.clock:
            complain(rank, f"its clock is {found.clock:+.1f} s from that of {first.host} (preflight.clock {settings.clock:g})")
        if found.disk < settings.disk * _GB:
            complain(rank, f"the run's disk has {found.disk / _GB:.2f} GB free, preflight.disk asks for {settings.disk:g}")
        if found.shm < settings.shm * _GB:
            complain(rank, f"/dev/shm has {found.shm / _GB:.2f} GB free, preflight.shm asks for {settings.shm:g}")
    rates = {rank: found.matmul for rank, found in facts.items() if found.matmul is not None}
    for rank in _slow(rates, settings.matmul_share):
        typical = statistics.median(rates.values())
        complain(rank, f"device {rank % devices} multiplies at {rates[rank] / typical:.0%} of the median")
    for rank, sentence in _slow_links(nodes, devices, facts, settings.network_share):
        complain(rank, sentence)
    return sick


def _slow(rates: Mapping[int, float], share: float) -> list[int]:
    """Those slower than ``share`` of the median; of fewer than three nobody knows which is the odd one."""
    if len(rates) < 3:
        return []
    return [rank for rank, rate in rates.items() if rate < share * statistics.median(rates.values())]


def _slow_links(nodes: Sequence[str], devices: int, facts: Mapping[int, Facts], share: float) -> list[tuple[int, str]]:
    """A node whose links to both neighbours are slow is sick; where there is none, of a slow link the node that receives."""
    into = {rank // devices: found.received for rank, found in facts.items() if found.received is not None}
    ring, slow = sorted(into), set(_slow(into, share))
    both = {node for i, node in enumerate(ring) if {node, ring[(i + 1) % len(ring)]} <= slow}
    complaints = []
    for node in sorted(both or slow):
        part = into[node] / statistics.median(into.values())
        complaints.append((node * devices, f"receives from {nodes[ring[ring.index(node) - 1]]} at {part:.0%} of the median link"))
    return complaints


def refusal(nodes: Sequence[str], sick: Mapping[str, Sequence[str]], needed: int) -> str | None:
    """Why nothing can be started, if fewer than ``needed`` nodes are fit."""
    if len(nodes) - len(sick) >= needed:
        return None
    told = "; ".join(f"{node}: {', '.join(sentences)}" for node, sentences in sick.items())
    return f"{len(nodes) - len(sick)} of {len(nodes)} nodes are fit, {needed} needed; {told}"
