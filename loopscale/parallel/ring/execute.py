"""Runs a ring plan on this rank's stage.

Every visit is its own backward segment: it starts from the gradient that arrives from the next visit plus that of its
own exit, and ends at the state it was given. So the memory of a visit is freed as soon as its backward has run, and
the shared weights collect the gradients of all visits in fp32. What injection needs of the input (the feed) is a leaf
per microbatch; when its last visit is done, the sum goes through the prelude once.

One stage runs the same plan as many: what it would send to a neighbour it hands to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loopscale.objective.supervision import Exit
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.offload import waiting_on_cpu
from loopscale.parallel.ring.plan import Kind, Operation, Plan, Work

InputsT = TypeVar("InputsT")
StageInputs = TypeVar("StageInputs", contravariant=True)
Feed = tuple[Tensor, ...]
"""What the visits of a microbatch need of its input, computed once by the prelude."""


class Stage(Protocol[StageInputs]):
    """What the executor asks of a model's stage. S positions (those held here), B sequences, d width. The home stage alone
    is asked for prelude and exits; behind it a visit's feed is empty and its state never None."""

    def state_shape(self, inputs: StageInputs) -> Sequence[int]:
        """[S, B, d]."""

    def prelude(self, inputs: StageInputs) -> Feed:
        """The feed, with its graph."""

    def visit(self, inputs: StageInputs, feed: Feed, state: Tensor | None, visit: int) -> Tensor:
        """The state [S, B, d] as this stage leaves it in visit ``visit``; home's ``state`` is None at the first."""

    def exit(self, inputs: StageInputs, exit: Exit, states: Mapping[int, Tensor]) -> ExitLoss:
        """The exit's losses, of the states after ``exit.visits``."""

    def finished(self, inputs: StageInputs) -> None:
        """Nothing more will be asked about ``inputs`` in this plan."""


@dataclass(frozen=True)
class ExitLoss:
    """Parts of the objective at an exit, by name, with their graph."""

    tokens: Mapping[str, Tensor]
    """Sums over scored tokens."""
    sequences: Mapping[str, Tensor]
    """Sums over sequences."""
    losses: Tensor
    """Cross entropy of each token at the exit's last visit, nats, without graph, 0 where not scored: [S * B]."""


@dataclass(frozen=True)
class Task(Generic[InputsT]):
    """A microbatch: its input, its depth, its exits, and the factors that turn the sums of an exit into the objective."""

    inputs: InputsT
    depth: int
    gradient_visits: int
    exits: tuple[Exit, ...]
    token_scale: float = 1.0
    sequence_scale: float = 1.0

    @property
    def work(self) -> Work:
        """What the plan knows of it."""
        return Work(self.depth, self.gradient_visits, tuple(e.visit for e in self.exits))


@dataclass(frozen=True)
class Outcome:
    """What a microbatch leaves beside gradients."""

    losses: dict[int, Tensor]
    """Per exit, each token's cross entropy, see :class:`ExitLoss`."""
    terms: dict[str, Tensor]
    """The parts of the objective, scaled; they add up to it."""


Observer = Callable[[int, int, "Tensor | None", Tensor], None]
"""Called after every visit with (microbatch, visit, state before, state after)."""


def execute(
    plan: Plan,
    stage: Stage[InputsT],
    tasks: Sequence[Task[InputsT]],
    links: Links,
    *,
    recompute: bool = False,
    offload: bool = False,
    observe: Observer | None = None,
    tell: Callable[[Operation], None] | None = None,
) -> list[Outcome]:
    """Runs ``plan`` on the stage of ``links`` and leaves the gradients of the objective in the stage's parameters.

    With ``recompute`` a visit keeps only its input and runs again just before its backward, and so does the prelude; with
    ``offload`` what they keep waits in CPU memory. Outcomes arise on the home stage and are empty elsewhere; ``observe`` is
    called there. ``tell`` hears of every operation before it runs.
    """
    run = _Run(plan, stage, tasks, links, recompute, offload, observe)
    links.open(plan, lambda m: stage.state_shape(tasks[m].inputs))
    operations = plan.operations[links.stage]
    last = {operation.microbatch: i for i, operation in enumerate(operations)}
    for i, operation in enumerate(operations):
        if tell is not None:
            tell(operation)
        run.perform(operation)
        if last[operation.microbatch] == i:
            stage.finished(tasks[operation.microbatch].inputs)
    links.close()
    return run.outcomes


class _Run(Generic[InputsT]):
    def __init__(
        self, plan: Plan, stage: Stage[InputsT], tasks: Sequence[Task[InputsT]], links: Links, recompute: bool,
        offload: bool, observe: Observer | None,
    ):  # fmt: skip
        self.plan, self.stage, self.tasks, self.links = plan, stage, tasks, links
        self.recompute, self.offload, self.forward_only, self.observe = recompute, offload, plan.forward_only, observe
        self.is_home = links.stage == 0
        self.outcomes = [Outcome({}, {}) for _ in tasks]
        self.exits = [{e.visit: e for e in task.exits} for task in tasks]
        self.feeds: dict[int, tuple[Feed | None, Feed]] = {}  # home's: with graph unless recomputed, and as leaves
        self.states: dict[int, Tensor] = {}  # home's: after the last visit that came home
        self.gathered: dict[int, dict[int, Tensor]] = {}  # home's: earlier states that a later exit needs
        self.segments: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}  # a visit's input leaf and output
        self.gradients: dict[tuple[int, int], Tensor] = {}  # home's: by the state after a visit, as far as it is known

    def perform(self, operation: Operation) -> None:
        needed = self.plan.needs(self.links.stage, operation)
        arrived = None if needed is None else self.links.take(needed)
        _, m, r = operation
        match operation.kind:
            case Kind.PRELUDE:
                self.prelude(m)
            case Kind.VISIT:
                if self.is_home and arrived is not None:
                    self.come_home(m, r - 1, arrived)
                self.visit(operation, self.states.get(m) if self.is_home else arrived)
            case Kind.EXIT:
                assert arrived is not None
                self.come_home(m, r, arrived)
                self.exit(operation)
            case Kind.VISIT_BACKWARD:
                assert arrived is not None
                self.visit_backward(operation, arrived)
            case Kind.PRELUDE_BACKWARD:
                self.prelude_backward(m)

    @contextmanager
    def keeping(self, differentiated: bool) -> Iterator[None]:
        """Keeps what the backward needs, if there will be one and it is not recomputed: here, or in CPU memory."""
        keeps = differentiated and not self.recompute
        with torch.set_grad_enabled(keeps), waiting_on_cpu() if keeps and self.offload else nullcontext():
            yield

    def release(self, operation: Operation, tensor: Tensor) -> None:
        """Sends what ``operation`` has made ready, if the plan says that something is."""
        message = self.plan.releases(self.links.stage, operation)
        if message is not None:
            self.links.send(message, tensor)

    def prelude(self, m: int) -> None:
        differentiated = self.tasks[m].gradient_visits > 0 and not self.forward_only
        with self.keeping(differentiated):
            feed = self.stage.prelude(self.tasks[m].inputs)
        self.feeds[m] = None if self.recompute else feed, tuple(t.detach().requires_grad_(differentiated) for t in feed)

    def come_home(self, m: int, r: int, state: Tensor) -> None:
        """Home takes in the state after visit ``r``."""
        if self.observe is not None:
            self.observe(m, r, self.states.get(m), state)
        self.states[m] = state
        if any(r in e.visits for e in self.tasks[m].exits if e.visit > r):
            self.gathered.setdefault(m, {})[r] = state

    def visit(self, operation: Operation, before: Tensor | None) -> None:
        _, m, r = operation
        task = self.tasks[m]
        first = task.depth - task.gradient_visits + 1
        differentiated = r >= first and not self.forward_only
        leaf = None
        if before is not None:  # the first visit with gradient ends at home's input, and passes it to home from behind
            leaf = before.detach().requires_grad_(differentiated and (r > first or not self.is_home))
        with self.keeping(differentiated):
            after = self.stage.visit(task.inputs, self.feed(m), leaf, r)
        if differentiated:
            self.segments[m, r] = leaf, None if self.recompute else after
        self.release(operation, after.detach())
        if self.is_home and self.forward_only and r == task.depth:
            del self.feeds[m]

    def exit(self, operation: Operation) -> None:
        _, m, r = operation
        task, exit, outcome = self.tasks[m], self.exits[m][r], self.outcomes[m]
        held = {**self.gathered.get(m, {}), r: self.states[m]}
        states = {v: held[v].detach().requires_grad_(not self.forward_only) for v in exit.visits}
        with torch.set_grad_enabled(not self.forward_only):
            loss = self.stage.exit(task.inputs, exit, states)
            terms = {name: task.token_scale * term for name, term in loss.tokens.items()}
            terms |= {name: task.sequence_scale * term for name, term in loss.sequences.items()}
        outcome.losses[r] = loss.losses
        for name, term in terms.items():
            outcome.terms[name] = outcome.terms.get(name, 0.0) + term.detach()
        if not self.forward_only:
            torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
            for v, state in states.items():
                if state.grad is not None:
                    self.collect(m, v, state.grad)
        if r == task.depth:
            del self.states[m]
            self.gathered.pop(m, None)
            if task.gradient_visits and not self.forward_only:
                self.release(operation, self.gradients.pop((m, r)))

    def visit_backward(self, operation: Operation, gradient: Tensor) -> None:
        _, m, r = operation
        leaf, after = self.segments.pop((m, r))
        if after is None:
            with torch.enable_grad():
                after = self.stage.visit(self.tasks[m].inputs, self.feed(m), leaf, r)
        after.backward(gradient)  # type: ignore[no-untyped-call]
        if leaf is not None and leaf.grad is not None:
            if self.is_home:
                self.collect(m, r - 1, leaf.grad)
            self.release(operation, self.gradients.pop((m, r - 1)) if self.is_home else leaf.grad)

    def prelude_backward(self, m: int) -> None:
        feed, leaves = self.feeds.pop(m)
        if feed is None:
            with torch.enable_grad():
                feed = self.stage.prelude(self.tasks[m].inputs)
        reached = [(t, leaf.grad) for t, leaf in zip(feed, leaves, strict=True) if leaf.grad is not None]
        if reached:
            torch.autograd.backward([t for t, _ in reached], [g for _, g in reached])

    def feed(self, m: int) -> Feed:
        return self.feeds[m][1] if self.is_home else ()

    def collect(self, m: int, r: int, gradient: Tensor) -> None:
        held = self.gradients.get((m, r))
        self.gradients[m, r] = gradient if held is None else held.add_(gradient)
