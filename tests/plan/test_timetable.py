"""When operations run, held against what a microbatch's data impose."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings

from loopscale.parallel.ring.plan import Costs, Kind, Operation, Plan, Work, plan
from loopscale.plan.timetable import Timed, idle_shares, kept_visits, timetable
from tests.parallel.ring.test_plan import plans


def chain(work: Work, m: int, stages: int, forward_only: bool) -> list[tuple[int, Operation]]:
    """All that microbatch ``m`` does and where, each waiting for the one before."""
    steps = [(0, Operation(Kind.PRELUDE, m, 0))]
    for r in range(1, work.depth + 1):
        steps += [(s, Operation(Kind.VISIT, m, r)) for s in range(stages)]
        steps += [(0, Operation(Kind.EXIT, m, r))] * (r in work.exits)
    if not forward_only:
        for r in range(work.depth, work.depth - work.gradient_visits, -1):
            steps += [(s, Operation(Kind.VISIT_BACKWARD, m, r)) for s in reversed(range(stages))]
        steps.append((0, Operation(Kind.PRELUDE_BACKWARD, m, 0)))
    return steps


@given(plans())
@settings(max_examples=200, deadline=None)
@example(plan(1, [Work(1, 1, (1,))]))
@example(plan(2, [Work(3, 0, (3,))] * 3))
def test_every_operation_runs_once_when_stage_and_input_are_free(ring: Plan) -> None:
    rows = timetable(ring)
    assert [tuple(timed.operation for timed in row) for row in rows] == list(ring.operations)
    assert max(row[-1].end for row in rows) == pytest.approx(ring.makespan)
    for stage, row in enumerate(rows):
        for timed, following in pairwise(row):
            assert timed.end <= following.start
        for operation, start, end in row:
            assert end == start + ring.costs.of(operation, stage) and start >= 0
    at = {(stage, timed.operation): timed for stage, row in enumerate(rows) for timed in row}
    for m, work in enumerate(ring.work):
        steps = [at[step] for step in chain(work, m, ring.stages, ring.forward_only)]
        assert all(before.end <= after.start for before, after in pairwise(steps))


def test_a_timetable_by_hand() -> None:
    costs = Costs(prelude=1.0, visit=(2.0, 3.0), visit_backward=(4.0, 5.0), exit=6.0, prelude_backward=7.0)
    ring = plan(2, [Work(2, 1, (2,))], costs=costs)
    prelude, visits = Operation(Kind.PRELUDE, 0, 0), [Operation(Kind.VISIT, 0, r) for r in (1, 2)]
    home = [
        Timed(prelude, 0, 1), Timed(visits[0], 1, 3), Timed(visits[1], 6, 8), Timed(Operation(Kind.EXIT, 0, 2), 11, 17),
        Timed(Operation(Kind.VISIT_BACKWARD, 0, 2), 22, 26), Timed(Operation(Kind.PRELUDE_BACKWARD, 0, 0), 26, 33),
    ]  # fmt: skip
    behind = [Timed(visits[0], 3, 6), Timed(visits[1], 8, 11), Timed(Operation(Kind.VISIT_BACKWARD, 0, 2), 17, 22)]
    assert timetable(ring) == [home, behind]
    assert idle_shares(ring) == pytest.approx([11 / 33, 22 / 33])


@given(plans())
@settings(max_examples=100, deadline=None)
def test_kept_visits_stay_within_the_limit(ring: Plan) -> None:
    b = 0 if ring.forward_only else max(work.gradient_visits for work in ring.work)
    for stage in range(ring.stages):
        assert kept_visits(ring, stage) <= min(ring.in_flight, len(ring.work)) * b


def test_one_microbatch_keeps_its_gradient_visits() -> None:
    ring = plan(3, [Work(5, 3, (5,))] * 2, in_flight=1)
    assert [kept_visits(ring, stage) for stage in range(3)] == [3, 3, 3]
