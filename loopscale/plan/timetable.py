"""When the operations of a ring plan run, by its costs, and what follows from that."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from loopscale.parallel.ring.plan import Kind, Message, MessageKind, Operation, Plan


class Timed(NamedTuple):
    """An operation and when it runs, in the unit of the plan's costs."""

    operation: Operation
    start: float
    end: float


def timetable(plan: Plan) -> list[list[Timed]]:
    """When each stage runs its operations: in its order, each as soon as the stage is free and what it needs is there."""
    rows: list[list[Timed]] = [[] for _ in range(plan.stages)]
    waiting = [deque(operations) for operations in plan.operations]
    arrived: dict[tuple[int, Message | None], float] = {}  # by the stage that a message reaches
    awake = list(range(plan.stages))
    while awake:
        stage = awake.pop()
        row, todo = rows[stage], waiting[stage]
        while todo:
            needed = plan.needs(stage, todo[0])
            if needed is not None and (stage, needed) not in arrived:
                break
            operation = todo.popleft()
            start = max(row[-1].end if row else 0.0, arrived.pop((stage, needed), 0.0))
            row.append(Timed(operation, start, start + plan.costs.of(operation, stage)))
            released = plan.releases(stage, operation)
            if released is not None:
                target = (stage + (1 if released.kind is MessageKind.STATE else -1)) % plan.stages
                arrived[target, released] = row[-1].end
                awake.append(target)
    return rows


def idle_shares(plan: Plan) -> list[float]:
    """The share of the makespan in which each stage runs nothing."""
    busy = [sum(plan.costs.of(o, stage) for o in operations) for stage, operations in enumerate(plan.operations)]
    return [max(0.0, 1 - time / plan.makespan) for time in busy]


def kept_visits(plan: Plan, stage: int) -> int:
    """The most visits whose activations ``stage`` holds at once: they have run, and their backward has not."""
    now = most = 0
    for kind, m, visit in plan.operations[stage]:
        work = plan.work[m]
        if kind is Kind.VISIT and visit > work.depth - work.gradient_visits and not plan.forward_only:
            now += 1
            most = max(most, now)
        elif kind is Kind.VISIT_BACKWARD:
            now -= 1
    return most
