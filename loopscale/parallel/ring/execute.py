"""Runs a ring plan on this rank's stage.

Every visit is its own backward segment: it starts from the gradient that arrives from the next visit plus that of its
own exit, and ends at the state it was given. So the memory of a visit is freed as soon as its backward has run, and
the shared weights collect the gradients of all visits in fp32. What injection needs of the input (the feed) is a leaf
per microbatch; when its last visit is done, the sum goes through the prelude once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loopscale.parallel.ring.plan import Kind, Operation, Plan, Work

InputsT = TypeVar("InputsT")
StageInputs = TypeVar("StageInputs", contravariant=True)
Feed = tuple[Tensor, ...]
"""What the visits of a microbatch need of its input, computed once by the prelude."""


class Stage(Protocol[StageInputs]):
    """What the executor asks of a model. S positions, B sequences, d width."""

    def prelude(self, inputs: StageInputs) -> Feed:
        """The feed, with its graph."""

    def visit(self, inputs: StageInputs, feed: Feed, state: Tensor | None) -> Tensor:
        """The state [S, B, d] after one more visit; ``state`` is None at the first."""

    def exit(self, inputs: StageInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """The exit's loss summed over the scored tokens (with graph), and each token's [S * B]."""


@dataclass(frozen=True)
class Task(Generic[InputsT]):
    """A microbatch: its input, its work, and the factor on the summed loss of each exit."""

    inputs: InputsT
    work: Work
    scales: Mapping[int, float]


Observer = Callable[[int, int, "Tensor | None", Tensor], None]
"""Called after every visit with (microbatch, visit, state before, state after)."""


def execute(
    plan: Plan,
    stage: Stage[InputsT],
    tasks: Sequence[Task[InputsT]],
    *,
    recompute: bool = False,
    forward_only: bool = False,
    observe: Observer | None = None,
) -> list[dict[int, Tensor]]:
    """Runs ``plan`` and leaves gradients of Σ scale · loss in the stage's parameters.

    Returns, per microbatch, each exit's loss per token (detached, [S * B], 0 where a token is not scored). With
    ``recompute`` a visit keeps only its input and runs again just before its backward.
    """
    run = _Run(stage, tasks, recompute, forward_only, observe)
    for operation in plan.operations[0]:
        run.perform(operation)
    return run.losses


class _Run(Generic[InputsT]):
    def __init__(
        self, stage: Stage[InputsT], tasks: Sequence[Task[InputsT]], recompute: bool, forward_only: bool, observe: Observer | None
    ):
        self.stage, self.tasks, self.recompute, self.forward_only, self.observe = stage, tasks, recompute, forward_only, observe
        self.losses: list[dict[int, Tensor]] = [{} for _ in tasks]
        self.feeds: dict[int, tuple[Feed, Feed]] = {}  # with graph, and as leaves
        self.states: dict[int, Tensor] = {}  # after the last visit; its exit runs before the next one
        self.segments: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}  # a visit's input leaf and output
        self.gradients: dict[tuple[int, int], Tensor] = {}  # of the state after a visit

    def perform(self, operation: Operation) -> None:
        match operation.kind:
            case Kind.PRELUDE:
                self.prelude(operation.microbatch)
            case Kind.VISIT:
                self.visit(operation.microbatch, operation.visit)
            case Kind.EXIT:
                self.exit(operation.microbatch, operation.visit)
            case Kind.VISIT_BACKWARD:
                self.visit_backward(operation.microbatch, operation.visit)
            case Kind.PRELUDE_BACKWARD:
                self.prelude_backward(operation.microbatch)

    def prelude(self, m: int) -> None:
        with torch.set_grad_enabled(not self.forward_only):
            feed = self.stage.prelude(self.tasks[m].inputs)
        self.feeds[m] = feed, tuple(t.detach().requires_grad_(t.requires_grad) for t in feed)

    def visit(self, m: int, r: int) -> None:
        task, before = self.tasks[m], self.states.get(m)
        first = task.work.depth - task.work.gradient_visits + 1
        differentiated = r >= first and not self.forward_only
        leaf = None if before is None else before.detach().requires_grad_(differentiated and r > first)
        with torch.set_grad_enabled(differentiated and not self.recompute):
            after = self.stage.visit(task.inputs, self.feeds[m][1], leaf)
        if differentiated:
            self.segments[m, r] = leaf, None if self.recompute else after
        self.states[m] = after.detach()
        if self.observe is not None:
            self.observe(m, r, before, self.states[m])
        if self.forward_only and r == task.work.depth:
            del self.feeds[m]

    def exit(self, m: int, r: int) -> None:
        task = self.tasks[m]
        state = self.states[m].detach().requires_grad_(not self.forward_only)
        with torch.set_grad_enabled(not self.forward_only):
            total, self.losses[m][r] = self.stage.exit(task.inputs, state)
        if not self.forward_only:
            (total * task.scales[r]).backward()  # type: ignore[no-untyped-call]
            self.collect(m, r, state.grad)
        if r == task.work.depth:
            del self.states[m]

    def visit_backward(self, m: int, r: int) -> None:
        leaf, after = self.segments.pop((m, r))
        if after is None:
            with torch.enable_grad():
                after = self.stage.visit(self.tasks[m].inputs, self.feeds[m][1], leaf)
        after.backward(self.gradients.pop((m, r)))  # type: ignore[no-untyped-call]
        if leaf is not None and leaf.requires_grad:
            self.collect(m, r - 1, leaf.grad)

    def prelude_backward(self, m: int) -> None:
        feed, leaves = self.feeds.pop(m)
        reached = [(t, leaf.grad) for t, leaf in zip(feed, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([t for t, _ in reached], [g for _, g in reached])

    def collect(self, m: int, r: int, gradient: Tensor | None) -> None:
        assert gradient is not None
        held = self.gradients.get((m, r))
        self.gradients[m, r] = gradient if held is None else held.add_(gradient)
