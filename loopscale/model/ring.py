"""The ring of a configuration: which core layers each stage holds, what operations cost, and the plans that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loopscale.config import Config
from loopscale.depth import make_prior
from loopscale.model.flops import Counts, even_slices, operation_costs
from loopscale.objective.supervision import GATED, carried_visits, exits
from loopscale.parallel.ring.plan import Costs, Plan, Work, plan


def work_of(config: Config, depth: int) -> Work:
    """What one microbatch of ``depth`` visits is to the ring."""
    b = config.depth.gradient_visits(depth)
    return Work(depth, carried_visits(config.objective, b), tuple(e.visit for e in exits(config.objective, depth, b)))


@dataclass(frozen=True)
class Ring:
    """``slices``: core layers of each stage, home first; ``in_flight``: microbatches in the ring at once."""

    slices: tuple[int, ...]
    costs: Costs
    in_flight: int

    @classmethod
    def of(cls, config: Config, counts: Counts, slices: tuple[int, ...] | None = None) -> Ring:
        """The ring that ``config`` asks for; ``slices`` stand for those that were measured."""
        parallel, depth, stages = config.parallel, config.depth, config.parallel.pipeline
        decoded = depth.gradient_visits(depth.evaluation_depth) if config.objective.kind in GATED else 1
        if slices is None and not isinstance(parallel.slices, str):
            slices = parallel.slices
        if slices is None:
            law = [(share, work_of(config, r)) for r, share in enumerate(make_prior(depth).probabilities, 1) if share]
            slices = even_slices(counts, config.model.core_layers, stages, law, decoded)
        costs = operation_costs(counts, slices, decoded=decoded, recompute=config.train.recompute == "visit")
        return cls(slices, costs, parallel.in_flight or (1 if stages == 1 else 2 * stages))

    def plan(self, work: Sequence[Work], forward_only: bool = False) -> Plan:
        """The order of operations for microbatches of ``work``."""
        costs = replace(self.costs, exit=self.costs.exit / 3) if forward_only else self.costs  # no gradients to compute
        return plan(len(self.slices), work, in_flight=self.in_flight, costs=costs, forward_only=forward_only)
