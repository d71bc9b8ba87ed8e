"""Which visits are supervised, when, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from loopscale.config.tree import ObjectiveConfig


@dataclass(frozen=True)
class Exit:
    """A loss that is taken when visit ``visit`` (1-based) has run.

    ``visits``: the visits whose states it needs, the last of them ``visit``; ``weight``: factor on its cross entropy;
    ``scale_terms``: whether it carries the norm penalty and the anchor, which see all of ``visits``.
    """

    visit: int
    visits: tuple[int, ...]
    weight: float = 1.0
    scale_terms: bool = False


GATED = ("exit_gate", "exit_gate_stage2")
"""Objectives that weigh the visits against each other: one exit over all their states."""


def exits(objective: ObjectiveConfig, depth: int, gradient_visits: int) -> tuple[Exit, ...]:
    """The exits of a forward of ``depth`` visits, the last ``gradient_visits`` with gradient; weights sum to 1.

    ``terminal``: the last visit. ``per_loop``: the visits that carry gradient, equally (Paper A: (1/K) Σ_k CE_k) or as
    ``loop_weights`` says. Gated: one exit at the last visit, over all of them.
    """
    differentiated = tuple(range(depth - gradient_visits + 1, depth + 1))
    scale_terms = objective.norm_penalty > 0 or objective.anchor > 0
    if objective.kind in GATED:
        return (Exit(depth, differentiated, 1.0, scale_terms),)
    last = differentiated if scale_terms else (depth,)
    if objective.kind == "terminal":
        return (Exit(depth, last, 1.0, scale_terms),)
    weights = objective.loop_weights or (1.0,) * gradient_visits
    shares = [w / sum(weights[-gradient_visits:]) for w in weights[-gradient_visits:]]
    early = [Exit(r, (r,), share) for r, share in zip(differentiated[:-1], shares[:-1], strict=True)]
    return (*early, Exit(depth, last, shares[-1], scale_terms))


def carried_visits(objective: ObjectiveConfig, gradient_visits: int) -> int:
    """Of the visits that losses see, those that gradient goes back through: none where the gate alone is trained."""
    return 0 if objective.kind == "exit_gate_stage2" else gradient_visits


def is_trained(objective: ObjectiveConfig, parameter: str) -> bool:
    """Stage II of the exit gate trains the gate and freezes the language model."""
    return objective.kind != "exit_gate_stage2" or parameter.startswith("gate.")


def term_names(objective: ObjectiveConfig) -> tuple[str, ...]:
    """The parts of the objective, each reported on its own."""
    names = {"exit_gate": ("cross_entropy", "gate_entropy"), "exit_gate_stage2": ("gate",)}.get(
        objective.kind, ("cross_entropy",)
    )
    return (*names, *(name for name in ("norm_penalty", "anchor") if getattr(objective, name)))
