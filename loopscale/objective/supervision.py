"""Which visits are supervised, and by how much."""

from __future__ import annotations

from loopscale.config.tree import ObjectiveConfig


def exit_weights(objective: ObjectiveConfig, depth: int, gradient_visits: int) -> dict[int, float]:
    """Weight of the cross entropy at each supervised visit (1-based); the weights sum to 1.

    ``terminal``: the last visit. ``per_loop``: the visits that carry gradient, equally (Paper A: (1/K) Σ_k CE_k).
    """
    if objective.kind == "terminal":
        return {depth: 1.0}
    return {r: 1.0 / gradient_visits for r in range(depth - gradient_visits + 1, depth + 1)}
