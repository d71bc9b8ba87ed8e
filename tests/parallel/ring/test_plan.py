"""The ring plan, held against an executor's view of it: blocking receives, messages in the sender's order."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import Counter, deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopscale.errors import UsageError
from loopscale.parallel.ring.plan import Costs, Kind, MessageKind, Operation, Plan, Work, plan

P, V, X, VB, PB = Kind.PRELUDE, Kind.VISIT, Kind.EXIT, Kind.VISIT_BACKWARD, Kind.PRELUDE_BACKWARD
STATE, GRADIENT = MessageKind.STATE, MessageKind.GRADIENT


@st.composite
def works(draw: st.DrawFn, forward_only: bool) -> Work:
    depth = draw(st.integers(1, 7))
    gradient_visits = draw(st.integers(1, depth))
    first = 1 if forward_only else depth - gradient_visits + 1
    exits = draw(st.sets(st.integers(first, depth))) | {depth}
    return Work(depth, gradient_visits, tuple(sorted(exits)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages, forward_only = draw(st.integers(1, 9)), draw(st.booleans())
    time = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0, 3))
    per_stage = st.lists(time, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(draw(time), draw(per_stage), draw(per_stage), draw(time), draw(time))
    return plan(
        stages,
        draw(st.lists(works(forward_only), min_size=1, max_size=12)),
        in_flight=draw(st.none() | st.integers(1, 14)),
        costs=draw(st.none() | st.just(costs)),
        forward_only=forward_only,
    )


def expected_operations(work: Work, m: int, stage: int, forward_only: bool) -> list[Operation]:
    """What microbatch ``m`` does on ``stage``, in the order that its data impose there."""
    home = stage == 0
    operations = [Operation(P, m, 0)] if home else []
    for r in range(1, work.depth + 1):
        operations.append(Operation(V, m, r))
        if home and r in work.exits:
            operations.append(Operation(X, m, r))
    if not forward_only:
        operations += [Operation(VB, m, r) for r in range(work.depth, work.depth - work.gradient_visits, -1)]
        operations += [Operation(PB, m, 0)] if home else []
    return operations


Sent = tuple[MessageKind, int, int]


class Replay:
    """Runs a plan as ranks would: each stage in its own order, sends buffered, receives blocking and in sending order.

    It knows what operations need and yield from the model's arithmetic, not from the plan's own account of messages.
    """

    def __init__(self, ring: Plan):
        self.ring = ring
        p = ring.stages
        # channels[stage, kind] leads away from a stage: states to the next one, gradients to the one before
        self.channels: dict[tuple[int, MessageKind], deque[tuple[Sent, float]]] = {
            (s, k): deque() for s in range(p) for k in (STATE, GRADIENT)
        }
        self.sent: dict[tuple[int, MessageKind], list[Sent]] = {key: [] for key in self.channels}
        self.stash: list[dict[Sent, float]] = [{} for _ in range(p)]
        self.free = [0.0] * p
        self.parts: Counter[tuple[int, int]] = Counter()  # contributions at home to the gradient by a visit's state
        self.first_needs: list[tuple[int, Operation, Sent]] = []
        self.taken: list[set[Sent]] = [set() for _ in range(p)]

    def run(self) -> None:
        todo = [deque(operations) for operations in self.ring.operations]
        while any(todo):
            moved = False
            for stage, operations in enumerate(todo):
                while operations and self.try_run(stage, operations[0]):
                    operations.popleft()
                    moved = True
            assert moved, f"deadlock: {[operations[:1] for operations in map(list, todo)]}"
        assert not any(self.channels.values()), "messages that nobody took"

    def try_run(self, stage: int, operation: Operation) -> bool:
        needed = self.needed(stage, operation)
        if needed is not None and not self.receive(stage, needed):
            return False
        if needed is not None and needed not in self.taken[stage]:
            self.taken[stage].add(needed)
            self.first_needs.append((stage, operation, needed))
        arrival = 0.0 if needed is None else self.stash[stage][needed]
        self.free[stage] = max(self.free[stage], arrival) + self.ring.costs.of(operation, stage)
        for message in self.yielded(stage, operation):
            self.channels[stage, message[0]].append((message, self.free[stage]))
            self.sent[stage, message[0]].append(message)
        return True

    def needed(self, stage: int, operation: Operation) -> Sent | None:
        kind, m, r = operation
        if kind is V and stage == 0:
            return (STATE, m, r - 1) if r > 1 else None
        return {V: (STATE, m, r), X: (STATE, m, r), VB: (GRADIENT, m, r)}.get(kind)

    def yielded(self, stage: int, operation: Operation) -> list[Sent]:
        kind, m, r = operation
        work = self.ring.work[m]
        if kind is V:
            return [(STATE, m, r)]
        if kind is VB and stage > 0:
            return [(GRADIENT, m, r)]
        if kind not in (X, VB) or self.ring.forward_only:
            return []
        state = r if kind is X else r - 1
        if state <= work.depth - work.gradient_visits:
            return []
        self.parts[m, state] += 1
        complete = (state in work.exits) + (state < work.depth)
        return [(GRADIENT, m, state)] if self.parts[m, state] == complete else []

    def receive(self, stage: int, needed: Sent) -> bool:
        sender = (stage - 1 if needed[0] is STATE else stage + 1) % self.ring.stages
        channel = self.channels[sender, needed[0]]
        while needed not in self.stash[stage] and channel:
            message, time = channel.popleft()
            assert message not in self.stash[stage]
            self.stash[stage][message] = time
        return needed in self.stash[stage]


@given(plans())
@settings(max_examples=250, deadline=None)
@example(plan(1, [Work(1, 1, (1,))]))
@example(plan(2, [Work(1, 1, (1,))] * 3, in_flight=1, costs=Costs(0.0, (0.0, 0.0), (0.0, 0.0), 0.0, 0.0)))
def test_a_plan_runs_as_predicted(ring: Plan) -> None:
    for stage, operations in enumerate(ring.operations):
        wanted = [expected_operations(w, m, stage, ring.forward_only) for m, w in enumerate(ring.work)]
        assert Counter(operations) == Counter(o for chain in wanted for o in chain)
        for m, chain in enumerate(wanted):
            assert [o for o in operations if o.microbatch == m] == chain

    replay = Replay(ring)
    replay.run()
    assert max(replay.free) == pytest.approx(ring.makespan)
    assert ring.makespan >= ring.lower_bound() * (1 - 1e-9)

    for stage in range(ring.stages):
        released = [(o, m) for o in ring.operations[stage] if (m := ring.releases(stage, o)) is not None]
        for kind in (STATE, GRADIENT):
            assert [tuple(m) for _, m in released if m.kind is kind] == replay.sent[stage, kind]
        if ring.stages == 1:
            continue
        here, after = ring.messages(stage), ring.messages((stage + 1) % ring.stages)
        assert [tuple(m) for m in here.states_sent] == replay.sent[stage, STATE]
        assert [tuple(m) for m in here.gradients_sent] == replay.sent[stage, GRADIENT]
        assert here.states_sent == after.states_received
        assert here.gradients_received == after.gradients_sent
    needs = [(s, o, tuple(m)) for s, ops in enumerate(ring.operations) for o in ops if (m := ring.needs(s, o)) is not None]
    assert Counter(needs) == Counter(replay.first_needs)


@given(plans())
@settings(max_examples=150, deadline=None)
def test_slots_are_never_exceeded(ring: Plan) -> None:
    live, last = set(), {m: (X, w.depth) if ring.forward_only else (PB, 0) for m, w in enumerate(ring.work)}
    for kind, m, r in ring.operations[0]:
        if kind is P:
            live.add(m)
        assert m in live
        assert len(live) <= ring.in_flight
        if (kind, r) == last[m]:
            live.remove(m)
    assert not live


@given(plans())
@settings(max_examples=60, deadline=None)
def test_the_digest_is_the_plan_and_nothing_else(ring: Plan) -> None:
    again = plan(ring.stages, list(ring.work), in_flight=ring.in_flight, costs=ring.costs, forward_only=ring.forward_only)
    assert again == ring
    assert again.digest() == ring.digest() and len(ring.digest()) == 64

    first = ring.operations[0]
    swapped = dataclasses.replace(ring, operations=((first[1], first[0], *first[2:]), *ring.operations[1:]))
    deeper = dataclasses.replace(ring, work=(*ring.work[:-1], dataclasses.replace(ring.work[-1], depth=ring.work[-1].depth + 1)))
    flipped = dataclasses.replace(ring, forward_only=not ring.forward_only)
    assert len({ring.digest(), swapped.digest(), deeper.digest(), flipped.digest()}) == 4
    assert dataclasses.replace(ring, makespan=ring.makespan + 1).digest() == ring.digest()


def test_the_digest_of_a_known_plan_does_not_change_with_the_interpreter() -> None:
    ring = plan(2, [Work(2, 1, (2,)), Work(3, 2, (2, 3))])
    assert ring.digest() == "9b397f39c0b6afaf16d08fd5969ae335a78332bc6cdf9c96f824a8f5166bd6b2"


@pytest.mark.parametrize("in_flight", [1, None])
def test_one_stage_finishes_a_microbatch_before_the_next(in_flight: int | None) -> None:
    ring = plan(1, [Work(2, 1, (2,)), Work(3, 2, (2, 3))], in_flight=in_flight)
    long = [(P, 1, 0), (V, 1, 1), (V, 1, 2), (X, 1, 2), (V, 1, 3), (X, 1, 3), (VB, 1, 3), (VB, 1, 2), (PB, 1, 0)]
    short = [(P, 0, 0), (V, 0, 1), (V, 0, 2), (X, 0, 2), (VB, 0, 2), (PB, 0, 0)]
    assert ring.operations == (tuple(Operation(*o) for o in long + short),)
    assert ring.makespan == ring.lower_bound() == 0.5 * 2 + 5 * 1 + 3 * 1 + 3 * 2 + 2 * 1
    assert not any(dataclasses.astuple(ring.messages(0)))


def test_the_bound_counts_fill_and_drain() -> None:
    costs = Costs(prelude=1.0, visit=(2.0, 3.0, 50.0), visit_backward=(4.0, 5.0, 90.0), exit=6.0, prelude_backward=7.0)
    training = plan(3, [Work(2, 1, (2,))] * 4, costs=costs)
    assert training.lower_bound() == (1 + 2 + 3) + 4 * (2 * 50 + 90) + (5 + 4 + 7)
    alone = plan(3, [Work(2, 1, (1, 2))], costs=costs, forward_only=True)
    assert alone.lower_bound() == 1 + 2 * (2 + 3 + 50) + 6
    assert alone.makespan == alone.lower_bound() + 6  # the first exit delays this one's second visit


@pytest.mark.parametrize(
    ("stages", "work", "options", "sentence"),
    [
        (0, [Work(1, 1, (1,))], {}, "at least one stage"),
        (2, [Work(1, 1, (1,))], {"in_flight": 0}, "not 2 and 0"),
        (2, [], {}, "at least one microbatch"),
        (2, [Work(2, 1, (2,)), Work(2, 3, (2,))], {}, "microbatch 1: expected 0 <= gradient visits"),
        (2, [Work(2, -1, (2,))], {}, "found -1 and 2"),
        (2, [Work(3, 1, (2, 3))], {}, "a visit after 2 to the depth 3"),
        (2, [Work(3, 3, (1, 2))], {}, "exits must ascend"),
        (2, [Work(3, 3, ())], {"forward_only": True}, "exits must ascend"),
        (2, [Work(1, 1, (1,))], {"costs": Costs.even(3)}, "one per stage (2)"),
        (1, [Work(1, 1, (1,))], {"costs": Costs(math.nan, (1.0,), (1.0,), 1.0, 1.0)}, "finite"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    stages: int, work: list[Work], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan(stages, work, **options)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


def poisson_log_normal(source: random.Random) -> Work:
    """A depth from the PLN-5 law, its last 10 visits with gradient, one exit."""
    threshold, product, events = math.exp(-math.exp(source.gauss(1.261294, 0.5))), source.random(), 0
    while product > threshold:
        product *= source.random()
        events += 1
    depth = min(64, 1 + events)
    return Work(depth, min(depth, 10), (depth,))


@pytest.mark.parametrize(("per_stage", "limit"), [(2, 1.10), (4, 1.02), (8, 1.02)])
@pytest.mark.parametrize("stages", [2, 5, 8])
def test_makespan_stays_close_to_the_bound(stages: int, per_stage: int, limit: float) -> None:
    source = random.Random(stages * 100 + per_stage)
    ratios = []
    for _ in range(30):
        ring = plan(stages, [poisson_log_normal(source) for _ in range(per_stage * stages)])
        ratios.append(ring.makespan / ring.lower_bound())
    assert statistics.quantiles(ratios, n=10)[-1] <= limit
