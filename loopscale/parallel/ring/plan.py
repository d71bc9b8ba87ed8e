"""The ring plan: which operation each pipeline stage runs next, for one optimizer step.

The loop is the pipeline. A state leaves the home stage (stage 0), passes the core's slices on stages 1 .. p-1 and comes
home, once per visit; gradients take the same way backwards. Home also runs what is not core: the prelude, the injection
(part of its share of a visit) and the exits. Microbatches may have different depths; one enters when a slot is free and
leaves after its last operation, so the ring does not drain between loops or microbatches (design §5).

Everything here is a pure function of its arguments: all ranks compute the same plan and compare :meth:`Plan.digest`.
Times are in whatever unit the costs are in; messages are taken to cost nothing.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Sequence
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

    ``exits`` is ascending and ends with R. When training, exits lie on visits that carry gradient; a forward-only plan
    takes exits anywhere and ignores b.
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
        """The message that ``operation`` on ``stage`` waits for; None when its inputs arise on its own stage.

        With one stage the answer names what the stage hands to itself. Home's visit r + 1 and exit r need the same
        STATE r: whichever runs first must keep it for the other.
        """
        kind, microbatch, visit = operation
        match kind:
            case Kind.VISIT if stage == 0:
                return Message(MessageKind.STATE, microbatch, visit - 1) if visit > 1 else None
            case Kind.VISIT | Kind.EXIT:
                return Message(MessageKind.STATE, microbatch, visit)
            case Kind.VISIT_BACKWARD:
                return Message(MessageKind.GRADIENT, microbatch, visit)
            case _:
                return None

    def releases(self, stage: int) -> tuple[Message | None, ...]:
        """For each operation of ``stage`` the message that it makes ready to send, or None.

        Home adds up the gradient by the state after visit r from exit r and from the backward of visit r + 1, so the
        later of the two releases it. With one stage the answer names what the stage hands to itself.
        """
        released: list[Message | None] = []
        half_done: set[tuple[int, int]] = set()  # gradients of which home has one of two parts
        for kind, microbatch, visit in self.operations[stage]:
            message: Message | None = None
            if kind is Kind.VISIT:
                message = Message(MessageKind.STATE, microbatch, visit)
            elif kind is Kind.VISIT_BACKWARD and stage > 0:
                message = Message(MessageKind.GRADIENT, microbatch, visit)
            elif kind in (Kind.EXIT, Kind.VISIT_BACKWARD) and not self.forward_only:
                work = self.work[microbatch]
                state = visit if kind is Kind.EXIT else visit - 1
                has_two_parts = state in work.exits and state < work.depth
                if has_two_parts and (microbatch, state) not in half_done:
                    half_done.add((microbatch, state))
                elif state > work.depth - work.gradient_visits:
                    message = Message(MessageKind.GRADIENT, microbatch, state)
            released.append(message)
        return tuple(released)

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
        return tuple(message for message in self.releases(stage) if message is not None and message.kind is kind)


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

    Several list schedules are tried, from the one that keeps the fewest activations on, until one comes within 1% of
    the lower bound; else the shortest is taken. Raises UsageError for work, costs or limits that cannot be.
    """
    in_flight = 2 * stages if in_flight is None else in_flight
    costs = Costs.even(stages) if costs is None else costs
    _check(stages, work, in_flight, costs, forward_only)
    graph = _Graph(stages, work, costs, forward_only)
    enough = 1.01 * _lower_bound(stages, work, costs, forward_only)
    makespan, order = math.inf, list[list[int]]()
    for rule in _RULES:
        candidate, candidate_order = _schedule(graph, in_flight, rule)
        if candidate < makespan:
            makespan, order = candidate, candidate_order
        if makespan <= enough:
            break
    operations = tuple(tuple(graph.operation[node] for node in nodes) for nodes in order)
    return Plan(stages, tuple(work), in_flight, forward_only, costs, operations, makespan)


def _check(stages: int, work: Sequence[Work], in_flight: int, costs: Costs, forward_only: bool) -> None:
    if stages < 1 or in_flight < 1:
        raise UsageError(f"a ring plan needs at least one stage and one microbatch in flight, not {stages} and {in_flight}")
    if not work:
        raise UsageError("a ring plan needs at least one microbatch")
    for m, w in enumerate(work):
        no_gradient = 0 if forward_only else w.depth - w.gradient_visits
        if w.depth < 1 or not (forward_only or 1 <= w.gradient_visits <= w.depth):
            raise UsageError(f"microbatch {m}: expected 1 <= gradient visits <= depth, found {w.gradient_visits} and {w.depth}")
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
    last one, backwards through the earlier stages, or onwards through the later ones and an exit when forward-only.
    """
    visits = sum(w.depth for w in work)
    backwards = 0 if forward_only else sum(w.gradient_visits for w in work)
    prelude_backward = 0.0 if forward_only else costs.prelude_backward
    home_only = len(work) * (costs.prelude + prelude_backward) + sum(len(w.exits) for w in work) * costs.exit
    bound = max(_chain(w, costs, forward_only) for w in work)
    for s in range(stages):
        busy = visits * costs.visit[s] + backwards * costs.visit_backward[s]
        if s == 0:
            bound = max(bound, busy + home_only)
            continue
        fill = costs.prelude + sum(costs.visit[:s])
        drain = sum(costs.visit[s + 1 :]) + costs.exit if forward_only else sum(costs.visit_backward[:s]) + prelude_backward
        bound = max(bound, fill + busy + drain)
    return bound


def _chain(work: Work, costs: Costs, forward_only: bool) -> float:
    """Time of one microbatch alone. Exits before the last run beside the chain, never on it."""
    forward = costs.prelude + work.depth * sum(costs.visit) + costs.exit
    return forward if forward_only else forward + work.gradient_visits * sum(costs.visit_backward) + costs.prelude_backward


class _Graph:
    """All operations of all stages as numbered nodes with what they wait for.

    ``operation``, ``stage``, ``cost`` have one entry per node; ``tail`` is the longest time from a node's start to its
    microbatch's end; ``waits`` counts what must finish before, and ``next`` lists what waits for it. ``place`` ranks
    the node's microbatch, longest chain first: the order in which microbatches enter. Starting the long ones early is
    what keeps the end of the step short. ``entries`` are the preludes in that order. A microbatch gives its slot back
    when all of its nodes in ``closes`` are done; ``closing`` counts them per place.
    """

    def __init__(self, stages: int, work: Sequence[Work], costs: Costs, forward_only: bool):
        self.stages, self.costs = stages, costs
        self.operation: list[Operation] = []
        self.stage: list[int] = []
        self.cost: list[float] = []
        self.place: list[int] = []
        self.waits: list[int] = []
        self.next: list[list[int]] = []
        self.entries: list[int] = []
        self.closes: set[int] = set()
        self.closing: list[int] = []
        longest_first = sorted(range(len(work)), key=lambda m: (-_chain(work[m], costs, forward_only), m))
        for place, m in enumerate(longest_first):
            self._add_microbatch(place, m, work[m], forward_only)
        self.tail = self.cost.copy()
        for node in reversed(range(len(self.cost))):  # nodes are numbered after all that they wait for
            self.tail[node] += max((self.tail[n] for n in self.next[node]), default=0.0)

    def _add_microbatch(self, place: int, m: int, work: Work, forward_only: bool) -> None:
        ring = range(self.stages)
        node = self._add(Operation(Kind.PRELUDE, m, 0), 0, place)
        self.entries.append(node)
        exits = {}
        for r in range(1, work.depth + 1):
            visit = Operation(Kind.VISIT, m, r)
            for s in ring:
                node = self._add(visit, s, place, node)
            if r in work.exits:
                exits[r] = self._add(Operation(Kind.EXIT, m, r), 0, place, node)
        if forward_only:
            closing = list(exits.values())
        else:
            node = exits.pop(work.depth)
            for r in range(work.depth, work.depth - work.gradient_visits, -1):
                backward = Operation(Kind.VISIT_BACKWARD, m, r)
                for s in reversed(ring):
                    also = (exits[r],) if s == self.stages - 1 and r in exits else ()
                    node = self._add(backward, s, place, node, *also)
            closing = [self._add(Operation(Kind.PRELUDE_BACKWARD, m, 0), 0, place, node)]
        self.closes.update(closing)
        self.closing.append(len(closing))

    def _add(self, operation: Operation, stage: int, place: int, *after: int) -> int:
        node = len(self.operation)
        self.operation.append(operation)
        self.stage.append(stage)
        self.cost.append(self.costs.of(operation, stage))
        self.place.append(place)
        self.waits.append(len(after))
        self.next.append([])
        for earlier in after:
            self.next[earlier].append(node)
        return node


class _Rule(NamedTuple):
    """How a stage chooses among operations that are ready: the one that is due first.

    A microbatch is due ``spacing`` after the one that entered before it, and an operation is due that long before its
    microbatch is as the rest of its chain takes. Equal due dates for all (spacing 0) would let the whole ring fall idle
    together, with all slots freed at once; wide spacing finishes one microbatch after the other and keeps few
    activations. ``hold`` puts off exits and backwards, so that long microbatches get ahead in their forward visits. Both
    are in units of one microbatch's mean work on one stage.
    """

    spacing: float
    hold: float


# From the fewest kept activations to the most. The first one orders strictly by microbatch: with one stage, where every
# order takes equally long, it is always taken. The others were chosen on log-normal Poisson depths of mean 5
# (tools/study_ring_plan.py): the second is within 2% when there are 4 microbatches per stage, the rest serve 2 per stage.
_RULES = (_Rule(1e6, 0.0), _Rule(0.2, 0.0), _Rule(0.12, 2.0), _Rule(0.0, 2.0), _Rule(0.0, 4.0))


def _schedule(graph: _Graph, in_flight: int, rule: _Rule) -> tuple[float, list[list[int]]]:
    """Makespan and nodes per stage, in order, when no stage idles while one of its operations is ready."""
    unit = sum(graph.cost) / (graph.stages * len(graph.entries))

    def due(node: int) -> tuple[float, int, int]:
        held = rule.hold if graph.operation[node].kind not in (Kind.PRELUDE, Kind.VISIT) else 0.0
        return (rule.spacing * graph.place[node] + held) * unit - graph.tail[node], graph.place[node], node

    by_due = sorted(range(len(graph.operation)), key=due)
    rank = [0] * len(by_due)
    for position, node in enumerate(by_due):
        rank[node] = position

    waits, closing, waiting = graph.waits.copy(), graph.closing.copy(), iter(graph.entries[in_flight:])
    ready: list[list[int]] = [[] for _ in range(graph.stages)]  # per stage a heap of ranks
    ready[0] = sorted(rank[node] for node in graph.entries[:in_flight])
    busy = [False] * graph.stages
    running: list[tuple[float, int]] = []  # heap of (end, node)
    order: list[list[int]] = [[] for _ in range(graph.stages)]
    now, changed = 0.0, {0}
    while True:
        for s in changed:
            if ready[s] and not busy[s]:
                node = by_due[heapq.heappop(ready[s])]
                busy[s] = True
                order[s].append(node)
                heapq.heappush(running, (now + graph.cost[node], node))
        if not running:
            return now, order
        now, changed = running[0][0], set()
        while running and running[0][0] == now:  # all that end together, before any stage chooses
            node = heapq.heappop(running)[1]
            freed = []
            for follower in graph.next[node]:
                waits[follower] -= 1
                if waits[follower] == 0:
                    freed.append(follower)
            if node in graph.closes:
                closing[graph.place[node]] -= 1
                if closing[graph.place[node]] == 0:
                    freed.extend(itertools.islice(waiting, 1))
            busy[graph.stage[node]] = False
            changed.add(graph.stage[node])
            for follower in freed:
                heapq.heappush(ready[graph.stage[follower]], rank[follower])
                changed.add(graph.stage[follower])
