"""The ring of a configuration: which core layers each stage holds, what operations cost, and the plans that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loopscale.config import Batch, Config
from loopscale.depth import DepthController, draw_depths, make_prior
from loopscale.model.flops import Counts, operation_costs
from loopscale.objective.supervision import GATED, carried_visits, exits
from loopscale.parallel.ring.plan import Costs, Plan, Work, plan
from loopscale.parallel.ring.slices import balanced_slices


def work_of(config: Config, depth: int) -> Work:
    """What one microbatch of ``depth`` visits is to the ring."""
    b = config.depth.gradient_visits(depth)
    return Work(depth, carried_visits(config.objective, b), tuple(e.visit for e in exits(config.objective, depth, b)))


def draws_at(config: Config, batch: Batch, law: DepthController, step: int) -> tuple[tuple[int, ...], ...]:
    """Depths drawn at ``step`` for each depth group: one, or one per sequence; the group runs to the deepest."""
    each = batch.group if config.depth.per_sequence else 1
    draws = draw_depths(law.at(step / config.train.steps), config.run.seed, step, batch.groups * each, config.depth.draws)
    return tuple(draws[g * each : (g + 1) * each] for g in range(batch.groups))


def works_at(config: Config, batch: Batch, draws: Sequence[Sequence[int]]) -> tuple[Work, ...]:
    """The microbatches of one replica: each depth group is cut into equally many."""
    return tuple(work_of(config, max(own)) for own in draws for _ in range(batch.microbatches_per_group))


def even_slices(config: Config, home: Costs, layer: tuple[float, float]) -> tuple[int, ...]:
    """Core layers of each stage such that the stages have equally much to do, on average over the depth law.

    ``home``: what a home stage without core layers takes; ``layer``: what one core layer takes forwards and backwards.
    """
    forward = backward = exits = 0.0
    for depth, share in enumerate(make_prior(config.depth).probabilities, 1):
        work = work_of(config, depth)
        forward, backward = forward + share * work.depth, backward + share * work.gradient_visits
        exits += share * len(work.exits)
    once = home.prelude + home.prelude_backward + exits * home.exit
    at_home = once + forward * home.visit[0] + backward * home.visit_backward[0]
    per_layer = forward * layer[0] + backward * layer[1]
    return balanced_slices(config.model.core_layers, config.parallel.pipeline, per_layer, at_home)


@dataclass(frozen=True)
class Ring:
    """``slices``: core layers of each stage, home first; ``in_flight``: microbatches in the ring at once."""

    slices: tuple[int, ...]
    costs: Costs
    in_flight: int

    @classmethod
    def of(cls, config: Config, counts: Counts, measured: tuple[int, ...] | None = None) -> Ring:
        """The ring that ``config`` asks for; ``measured`` slices stand for those that even operations would give."""
        parallel, layers = config.parallel, config.model.core_layers
        recompute = config.train.recompute != "none"
        decoded = config.depth.gradient_visits(config.depth.evaluation_depth) if config.objective.kind in GATED else 1

        def costs(slices: Sequence[int]) -> Costs:
            return operation_costs(counts, layers, slices, decoded=decoded, recompute=recompute)

        if not isinstance(parallel.slices, str):
            slices = parallel.slices
        elif measured is not None:
            slices = measured
        else:
            home, one = costs([0]), costs([0, 1])
            slices = even_slices(config, home, (one.visit[1], one.visit_backward[1]))
        return cls(slices, costs(slices), parallel.in_flight or (1 if parallel.pipeline == 1 else 2 * parallel.pipeline))

    def plan(self, work: Sequence[Work], forward_only: bool = False) -> Plan:
        """The order of operations for microbatches of ``work``."""
        costs = replace(self.costs, exit=self.costs.exit / 3) if forward_only else self.costs  # no gradients to compute
        return plan(len(self.slices), work, in_flight=self.in_flight, costs=costs, forward_only=forward_only)
