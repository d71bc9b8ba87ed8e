"""Exits: which visits, with which weight."""

from __future__ import annotations

from loopscale.config.tree import ObjectiveConfig
from loopscale.objective.supervision import Exit, exits, term_names


def test_terminal_is_the_last_visit():
    assert exits(ObjectiveConfig(kind="terminal"), 7, 3) == (Exit(7, (7,)),)


def test_per_loop_is_every_visit_that_carries_gradient():
    assert exits(ObjectiveConfig(kind="per_loop"), 4, 4) == tuple(Exit(r, (r,), 0.25) for r in (1, 2, 3, 4))
    assert exits(ObjectiveConfig(kind="per_loop"), 7, 2) == (Exit(6, (6,), 0.5), Exit(7, (7,), 0.5))
    weighted = exits(ObjectiveConfig(kind="per_loop", loop_weights=(1, 1, 2)), 3, 3)
    assert [e.weight for e in weighted] == [0.25, 0.25, 0.5]


def test_a_gate_and_scale_terms_see_all_states_at_the_last_visit():
    assert exits(ObjectiveConfig(kind="exit_gate"), 5, 3) == (Exit(5, (3, 4, 5)),)
    assert exits(ObjectiveConfig(norm_penalty=0.01), 5, 3) == (Exit(5, (3, 4, 5), 1.0, True),)
    per_loop = exits(ObjectiveConfig(kind="per_loop", anchor=0.1), 3, 2)
    assert per_loop == (Exit(2, (2,), 0.5), Exit(3, (2, 3), 0.5, True))


def test_terms_are_named_for_the_log():
    assert term_names(ObjectiveConfig()) == ("cross_entropy",)
    assert term_names(ObjectiveConfig(kind="exit_gate", anchor=1.0)) == ("cross_entropy", "gate_entropy", "anchor")
    assert term_names(ObjectiveConfig(kind="exit_gate_stage2")) == ("gate",)
