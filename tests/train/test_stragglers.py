"""Which ranks are called slow, and how often that is said."""

from __future__ import annotations

from loopscale.train.stragglers import PEERS, QUIET, STEPS, Stragglers

ROLES = [f"stage {rank // 4}, node{rank % 4}" for rank in range(8)]
STAGES = [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_rank_is_compared_with_the_median_of_its_own_stage():
    """Stage 1 takes three times as long as stage 0, which is the plan's business; its rank 6 takes twice its median."""
    stragglers = Stragglers(STAGES, ROLES)
    busy = [1.0, 1.4, 0.9, 1.1, 3.0, 3.3, 6.3, 2.7]
    assert stragglers.see(busy, STEPS) == (
        "rank 6 (stage 1, node2) works 2.0 times as long at a step as the median of the 4 ranks of its stage"
    )  # 6.3 over the mean of 3.0 and 3.3


def test_the_slowest_comes_first_and_of_many_a_few_are_named():
    stragglers = Stragglers([0] * 15, [f"stage 0, node{rank}" for rank in range(15)])
    said = stragglers.see([1.0] * 9 + [2.0, 7.0, 3.0, 4.0, 5.0, 6.0], STEPS)
    assert [part.split(" (")[0] for part in said.split("; ")] == ["rank 10", "rank 14", "rank 13", "rank 12", "and 2 more"]


def test_fewer_peers_than_make_a_median_are_not_judged():
    stragglers = Stragglers([0] * (PEERS - 1) + [1] * PEERS, ["somewhere"] * (2 * PEERS - 1))
    assert stragglers.see([1.0] * (PEERS - 2) + [9.0] + [1.0] * PEERS, STEPS) is None


def test_steps_are_judged_together_by_their_weight():
    """Windows of 4, 4 and 2 steps: the rank is slow in the last only, by 3.2 times; on average by 1.44 times. Then anew."""
    stragglers = Stragglers([0] * 3, ["somewhere"] * 3)
    assert stragglers.see([1.0, 1.0, 1.0], 4) is None
    assert stragglers.see([1.0, 1.0, 1.0], 4) is None
    assert stragglers.see([1.0, 1.0, 3.2], 2) is None
    assert "rank 2 (somewhere) works 1.6 times" in stragglers.see([1.0, 1.0, 1.6], STEPS)


def test_a_warning_is_repeated_after_a_while():
    stragglers = Stragglers([0] * 3, ["somewhere"] * 3)
    said = [n for n in range(3 * QUIET) if stragglers.see([1.0, 1.0, 2.0], STEPS)]
    assert said == [0, QUIET, 2 * QUIET]
