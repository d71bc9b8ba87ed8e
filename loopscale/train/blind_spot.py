"""When a run should be told that its loss cannot see how its state grows (Paper A's readout blind spot).

Behind an RMSNorm the loss of a loop is the same for a state of any scale, so nothing holds the scale: it drifts, and a visit
that adds a bounded change turns a large state less and less. A growing norm is harmless where a loss sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from loopscale.config import Config

GROWTH = 8.0
"""Since the first record: the factor that is told, and then each further one."""


class BlindSpot:
    """Sees the norms of a run's records; equal records give equal words, so that of a resumed run what was told is known."""

    def __init__(self, config: Config, records: Iterable[Mapping[str, Any]] = ()):
        self._config, self._is_blind = config, is_blind(config)
        self._first: tuple[int, float] | None = None
        self._before, self._told = 0.0, 1.0
        for record in records:
            self.see(record["step"], record.get("state_norm") or [])

    def see(self, step: int, norms: list[float]) -> str | None:
        """Takes the mean norm by loop; returns a sentence when that at the evaluation depth has grown and still grows. Steps
        that drew smaller depths alone are left out."""
        depth = self._config.depth.evaluation_depth
        if not self._is_blind or len(norms) < depth or not norms[depth - 1]:
            return None
        norm, before = norms[depth - 1], self._before
        self._before = norm
        if self._first is None:
            self._first = (step, norm)
            return None
        since, first = self._first
        growth = norm / first
        if growth < GROWTH * self._told or norm <= before:
            return None
        self._told = growth
        return self._words(growth, since)

    def _words(self, growth: float, since: int) -> str:
        config = self._config
        loss = {"per_loop": "per-loop loss", "terminal": "terminal loss"}[config.objective.kind]
        norm = "a coda behind a norm" if config.model.coda_norm else f"{_article(config.model.readout)} readout"
        raw = [] if config.model.coda_norm else ["model.readout=raw"]
        *remedies, last = ["objective.norm_penalty=0.01", *raw, "model.between=rmsnorm"]
        return (
            f"blind spot: {loss} through {norm} cannot see the state's scale, which has grown {growth:.3g}x since step {since}; "
            f"remedy: {', '.join(remedies)} or {last}"
        )


def is_blind(config: Config) -> bool:
    """Whether no loss sees the scale of the state, and nothing in the loop removes it."""
    model, objective = config.model, config.objective
    if objective.kind not in ("per_loop", "terminal") or objective.norm_penalty or objective.anchor:
        return False
    if model.between in ("rmsnorm", "shared"):
        return False
    normed = model.readout == "rmsnorm" or (model.readout == "final_only" and objective.kind == "terminal")
    return model.coda_norm or (normed and not model.coda_layers)


def _article(name: str) -> str:
    return f"a {name}" if name == "final_only" else f"an {name}"
