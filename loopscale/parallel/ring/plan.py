"""The ring plan: which operation each pipeline stage runs next, for one optimizer step.

The loop is the pipeline. A state leaves the home stage (stage 0), passes the core's slices on stages 1 .. p-1 and comes
home, once per visit; gradients take the same way backwards. Home also runs what is not core: the prelude, the injection
(part of its share of a visit) and the exits. Microbatches may have different depths; one enters when a slot is free and
leaves after its last operation, so the ring does not drain between loops or microbatches.

One microbatch is a chain: every operation waits for the one before it, on whatever stage that ran. An exit comes before
the next visit although the visit does not need it, so that home keeps one state per microbatch and decodes what it has.

Everything here is a pure function of its arguments: all ranks compute the same plan and compare :meth:`Plan.digest`.
Times are in whatever unit the costs are in; messages are taken to cost nothing.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from loopscale.errors import UsageError


class Kind(StrEnum):
    """What an operation does. Home alone runs those that are not a visit."""

    PRELUDE = "prelude"
    VISIT = "visit"
    EXIT = "exit"  # computes its loss and, when training, that loss's gradient at once
    VISIT_BACKWARD = "visit_backward"
    PRELUDE_BACKWARD = "prelude_backward"


class Operation(NamedTuple):
    """One entry of a stage's list; ``visit`` counts from 1 and is 0 for the prelude's two operations."""

    kind: Kind
    microbatch: int
    visit: int


class MessageKind(StrEnum):
    """What a message carries: the state after a visit, or the loss's gradient by that state."""

    STATE = "state"
    GRADIENT = "gradient"


class Message(NamedTuple):
    """What one operation hands to another stage.

    STATE r travels from stage s to s + 1 (from the last stage home): visit r's state as far as stage s has brought it.
    GRADIENT r travels from stage s to s - 1 (from home to the last stage): the gradient by what STATE r held there.
    """

    kind: MessageKind
    microbatch: int
    visit: int


@dataclass(frozen=True)
class Messages:
    """Traffic of one stage, each direction in the order in which the *sender* sends.

    A receiver takes messages in this order and keeps those that it does not need yet: it may run operations in another
    order than their inputs were sent in.
    """

    states_sent: tuple[Message, ...]
    states_received: tuple[Message, ...]
    gradients_sent: tuple[Message, ...]
    gradients_received: tuple[Message, ...]


@dataclass(frozen=True)
class Work:
    """One microbatch: ``depth`` visits R, the last ``gradient_visits`` b of them with gradient, exits after ``exits``.

    ``exits`` is ascending and ends with R. When training, exits lie on visits that carry gradient, or b is 0 and exits
    alone are trained; a forward-only plan takes exits anywhere and ignores b.
    """

    depth: int
    gradient_visits: int
    exits: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """How long operations take, in any one unit; a visit's two costs have one entry per stage.

    Home's share of a visit includes the injection and may hold no core layers. ``exit`` is loss and gradient together
    when training and the loss alone in a forward-only plan.
    """

    prelude: float
    visit: tuple[float, ...]
    visit_backward: tuple[float, ...]
    exit: float
    prelude_backward: float

    @classmethod
    def even(cls, stages: int) -> Costs:
        """Equal stages, backward twice the forward: a guess for when nothing has been measured."""
        return cls(prelude=0.5, visit=(1.0,) * stages, visit_backward=(2.0,) * stages, exit=1.0, prelude_backward=1.0)

    def of(self, operation: Operation, stage: int) -> float:
        """What ``operation`` takes on ``stage``."""
        match operation.kind:
            case Kind.PRELUDE:
                return self.prelude
            case Kind.VISIT:
                return self.visit[stage]
            case Kind.EXIT:
                return self.exit
            case Kind.VISIT_BACKWARD:
                return self.visit_backward[stage]
            case Kind.PRELUDE_BACKWARD:
                return self.prelude_backward


@dataclass(frozen=True)
class Plan:
    """Ordered operations of every stage; ``makespan`` is what ``costs`` predict until the last one ends."""

    stages: int
    work: tuple[Work, ...]
    in_flight: int
    forward_only: bool
    costs: Costs
    operations: tuple[tuple[Operation, ...], ...]
    makespan: float

    def needs(self, stage: int, operation: Operation) -> Message | None:
        """The message that ``operation`` on ``stage`` waits for; None when its inputs arose on its own stage.

        Each message is needed by one operation: where visit r has an exit, the exit takes STATE r and home's visit
        r + 1 finds it there. With one stage the answer names what the stage hands to itself.
        """
        kind, m, visit = operation
        if kind is Kind.VISIT and stage == 0:
            taken = visit == 1 or visit - 1 in self.work[m].exits
            return None if taken else Message(MessageKind.STATE, m, visit - 1)
        if kind in (Kind.VISIT, Kind.EXIT):
            return Message(MessageKind.STATE, m, visit)
        return Message(MessageKind.GRADIENT, m, visit) if kind is Kind.VISIT_BACKWARD else None

    def releases(self, stage: int, operation: Operation) -> Message | None:
        """The message that ``operation`` on ``stage`` makes ready to send, or None.

        Home adds up the gradient by the state after visit r from exit r and from the backward of visit r + 1. The latter
        runs later, so it releases the sum; the last visit's gradient comes from its exit alone.
        """
        kind, m, visit = operation
        work = self.work[m]
        if kind is Kind.VISIT:
            return Message(MessageKind.STATE, m, visit)
        if kind is Kind.VISIT_BACKWARD and stage > 0:
            return Message(MessageKind.GRADIENT, m, visit)
        if kind is Kind.VISIT_BACKWARD and visit - 1 > work.depth - work.gradient_visits:
            return Message(MessageKind.GRADIENT, m, visit - 1)
        if kind is Kind.EXIT and visit == work.depth and work.gradient_visits and not self.forward_only:
            return Message(MessageKind.GRADIENT, m, visit)
        return None

    def messages(self, stage: int) -> Messages:
        """All that ``stage`` sends and receives, in order; nothing travels when there is one stage."""
        if self.stages == 1:
            return Messages((), (), (), ())
        return Messages(
            states_sent=self._sent(stage, MessageKind.STATE),
            states_received=self._sent((stage - 1) % self.stages, MessageKind.STATE),
            gradients_sent=self._sent(stage, MessageKind.GRADIENT),
            gradients_received=self._sent((stage + 1) % self.stages, MessageKind.GRADIENT),
        )

    def lower_bound(self) -> float:
        """A time that no order of operations can beat: see :func:`_lower_bound`."""
        return _lower_bound(self.stages, self.work, self.costs, self.forward_only)

    def digest(self) -> str:
        """SHA-256 (hex) of all that ranks must agree on to run together: work and order, not predicted times."""
        work = [[w.depth, w.gradient_visits, w.exits] for w in self.work]
        canonical = json.dumps([self.stages, self.forward_only, work, self.operations], separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _sent(self, stage: int, kind: MessageKind) -> tuple[Message, ...]:
        released = (self.releases(stage, operation) for operation in self.operations[stage])
        return tuple(message for message in released if message is not None and message.kind is kind)


def plan(
    stages: int,
    work: Sequence[Work],
    *,
    in_flight: int | None = None,
    costs: Costs | None = None,
    forward_only: bool = False,
) -> Plan:
    """Order the operations of ``work``, one entry per microbatch, over ``stages`` stages.

    A microbatch is in flight from its prelude to its prelude's backward (forward-only: to its last exit), and at most
    ``in_flight`` of them are (default: 2 per stage). That caps the visits whose activations a stage keeps at
    ``in_flight`` times the largest gradient depth.

    Several schedules are tried, from the one that keeps the fewest activations on, until one comes within 1% of the
    lower bound; else the shortest is taken. Raises UsageError for work, costs or limits that cannot be.
    """
    in_flight = 2 * stages if in_flight is None else in_flight
    costs = Costs.even(stages) if costs is None else costs
    _check(stages, work, in_flight, costs, forward_only)
    steps = _Steps(stages, work, costs, forward_only)
    enough = 1.01 * _lower_bound(stages, work, costs, forward_only)
    makespan, order = math.inf, list[list[int]]()
    for rule in (*_RULES, None):
        candidate = _thread(steps, in_flight) if rule is None else _list_schedule(steps, in_flight, rule)
        if candidate[0] < makespan:
            makespan, order = candidate
        if makespan <= enough:
            break
    operations = tuple(tuple(steps.operation[node] for node in nodes) for nodes in order)
    return Plan(stages, tuple(work), in_flight, forward_only, costs, operations, makespan)


def _check(stages: int, work: Sequence[Work], in_flight: int, costs: Costs, forward_only: bool) -> None:
    if stages < 1 or in_flight < 1:
        raise UsageError(f"a ring plan needs at least one stage and one microbatch in flight, not {stages} and {in_flight}")
    if not work:
        raise UsageError("a ring plan needs at least one microbatch")
    for m, w in enumerate(work):
        no_gradient = w.depth - w.gradient_visits if w.gradient_visits and not forward_only else 0
        if w.depth < 1 or not (forward_only or 0 <= w.gradient_visits <= w.depth):
            raise UsageError(
                f"microbatch {m}: expected 0 <= gradient visits <= depth >= 1, found {w.gradient_visits} and {w.depth}"
            )
        if not w.exits or w.exits[-1] != w.depth or list(w.exits) != sorted(set(w.exits)) or w.exits[0] <= no_gradient:
            raise UsageError(
                f"microbatch {m}: exits must ascend from a visit after {no_gradient} to the depth {w.depth}, found {w.exits}"
            )
    times = (costs.prelude, *costs.visit, *costs.visit_backward, costs.exit, costs.prelude_backward)
    if not len(costs.visit) == len(costs.visit_backward) == stages or not all(0 <= t < math.inf for t in times):
        raise UsageError(f"costs must be finite, not negative, and those of a visit one per stage ({stages}), found {costs}")


def _lower_bound(stages: int, work: Sequence[Work], costs: Costs, forward_only: bool) -> float:
    """The larger of the longest microbatch alone and the heaviest stage's work between its fill and drain.

    Fill: a prelude and a visit's way to the stage must pass before its first operation. Drain: the way home from its
    last one, backwards through the earlier stages, or onwards through the later ones and an exit when nothing goes back.
    """
    visits = sum(w.depth for w in work)
    backwards = 0 if forward_only else sum(w.gradient_visits for w in work)
    prelude_backward = 0.0 if forward_only else costs.prelude_backward
    home_only = len(work) * (costs.prelude + prelude_backward) + sum(len(w.exits) for w in work) * costs.exit
    bound = max(_alone(w, costs, forward_only) for w in work)
    for s in range(stages):
        busy = visits * costs.visit[s] + backwards * costs.visit_backward[s]
        if s == 0:
            bound = max(bound, busy + home_only)
            continue
        fill = costs.prelude + sum(costs.visit[:s])
        drain = sum(costs.visit_backward[:s]) + prelude_backward if backwards else sum(costs.visit[s + 1 :]) + costs.exit
        bound = max(bound, fill + busy + drain)
    return bound


def _alone(work: Work, costs: Costs, forward_only: bool) -> float:
    """Time of one microbatch alone, less its exits before the last: those need not delay it."""
    forward = costs.prelude + work.depth * sum(costs.visit) + costs.exit
    return forward if forward_only else forward + work.gradient_visits * sum(costs.visit_backward) + costs.prelude_backward


def _chain(stages: int, m: int, work: Work, forward_only: bool) -> Iterator[tuple[Operation, int]]:
    """All operations of microbatch ``m``, each with its stage and each waiting for the one before."""
    yield Operation(Kind.PRELUDE, m, 0), 0
    for r in range(1, work.depth + 1):
        yield from zip(itertools.repeat(Operation(Kind.VISIT, m, r)), range(stages))
        if r in work.exits:
            yield Operation(Kind.EXIT, m, r), 0
    if not forward_only:
        for r in range(work.depth, work.depth - work.gradient_visits, -1):
            yield from zip(itertools.repeat(Operation(Kind.VISIT_BACKWARD, m, r)), reversed(range(stages)))
        yield Operation(Kind.PRELUDE_BACKWARD, m, 0), 0


class _Steps:
    """All chains, one after the other, as numbered steps: a step waits for the one numbered before it in its chain.

    Chains are in the order in which microbatches enter, longest first: starting the long ones early is what keeps the
    end of the optimizer step short. ``chains`` holds their ranges of numbers; the lists have one entry per step:
    ``operation``, ``stage``, ``cost``, ``place`` (which chain) and ``tail`` (time from its start to the chain's end).
    """

    def __init__(self, stages: int, work: Sequence[Work], costs: Costs, forward_only: bool):
        self.stages = stages
        self.operation: list[Operation] = []
        self.stage: list[int] = []
        self.cost: list[float] = []
        self.place: list[int] = []
        self.tail: list[float] = []
        self.chains: list[range] = []
        longest_first = sorted(range(len(work)), key=lambda m: (-_alone(work[m], costs, forward_only), m))
        for place, m in enumerate(longest_first):
            start = len(self.cost)
            for operation, stage in _chain(stages, m, work[m], forward_only):
                self.operation.append(operation)
                self.stage.append(stage)
                self.cost.append(costs.of(operation, stage))
            chain = range(start, len(self.cost))
            self.chains.append(chain)
            self.place.extend([place] * len(chain))
            self.tail.extend(reversed(list(itertools.accumulate(self.cost[node] for node in reversed(chain)))))


class _Rule(NamedTuple):
    """How a stage of a list schedule chooses among steps that are ready: the one that is due first.

    A microbatch is due ``spacing`` after the one that entered before it, and a step is due as long before that as the
    rest of its chain takes. Equal due dates (spacing 0) let all slots come free at once, late, with nothing left to fill
    the ring meanwhile; wide spacing finishes one microbatch after the other and keeps few activations. ``hold`` puts off
    exits and backwards, so that long microbatches get ahead in their forward visits. The unit of both is one
    microbatch's mean work on one stage.
    """

    spacing: float
    hold: float


# From the fewest kept activations to the most. The first orders strictly by microbatch: with one stage, where every order
# takes equally long, it is always taken. The others were found on log-normal Poisson depths of mean 5
# (tools/study_ring_plan.py): the second comes within 2% at 4 microbatches per stage, the others serve 2 per stage.
_RULES = (_Rule(1e6, 0.0), _Rule(0.2, 0.0), _Rule(0.12, 2.0), _Rule(0.0, 4.0))


def _list_schedule(steps: _Steps, in_flight: int, rule: _Rule) -> tuple[float, list[list[int]]]:
    """Makespan and each stage's steps in order, when no stage idles while one of its steps is ready."""
    unit = sum(steps.cost) / (steps.stages * len(steps.chains))

    def due(node: int) -> tuple[float, int]:
        held = rule.hold if steps.operation[node].kind not in (Kind.PRELUDE, Kind.VISIT) else 0.0
        return (rule.spacing * steps.place[node] + held) * unit - steps.tail[node], node

    by_due = sorted(range(len(steps.cost)), key=due)
    rank = [0] * len(by_due)
    for position, node in enumerate(by_due):
        rank[node] = position

    last = {chain[-1] for chain in steps.chains}
    entries = [chain[0] for chain in steps.chains]
    waiting = iter(entries[in_flight:])
    ready: list[list[int]] = [[] for _ in range(steps.stages)]  # per stage a heap of ranks
    ready[0] = sorted(rank[node] for node in entries[:in_flight])
    busy = [False] * steps.stages
    running: list[tuple[float, int]] = []  # heap of (end, step)
    order: list[list[int]] = [[] for _ in range(steps.stages)]
    now, changed = 0.0, {0}
    while True:
        for s in changed:
            if ready[s] and not busy[s]:
                node = by_due[heapq.heappop(ready[s])]
                busy[s] = True
                order[s].append(node)
                heapq.heappush(running, (now + steps.cost[node], node))
        if not running:
            return now, order
        now, changed = running[0][0], set()
        while running and running[0][0] == now:  # all that end together, before any stage chooses
            node = heapq.heappop(running)[1]
            busy[steps.stage[node]] = False
            changed.add(steps.stage[node])
            follower = next(waiting, None) if node in last else node + 1
            if follower is not None:
                heapq.heappush(ready[steps.stage[follower]], rank[follower])
                changed.add(steps.stage[follower])


def _thread(steps: _Steps, in_flight: int) -> tuple[float, list[list[int]]]:
    """Makespan and each stage's steps in order, when chains are laid whole, one by one, into the gaps left before them.

    A stage may idle here although a step is ready, so the longest microbatch never waits for a shorter one. That is
    what counts when its chain alone takes about as long as the heaviest stage's work.
    """
    starts: list[list[float]] = [[] for _ in range(steps.stages)]
    ends: list[list[float]] = [[] for _ in range(steps.stages)]
    order: list[list[int]] = [[] for _ in range(steps.stages)]
    slots = [0.0] * in_flight  # heap of the times at which slots come free
    for chain in steps.chains:
        now = heapq.heappop(slots)
        for node in chain:
            s, cost = steps.stage[node], steps.cost[node]
            gap = bisect.bisect_right(ends[s], now)
            while gap < len(ends[s]) and starts[s][gap] < now + cost:
                now = max(now, ends[s][gap])
                gap += 1
            starts[s].insert(gap, now)
            now += cost
            ends[s].insert(gap, now)
            order[s].insert(gap, node)
        heapq.heappush(slots, now)
    return max(slots), order
