"""``loopscale plan``: the ring schedule of one optimizer step. Starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from loopscale.config import Config
from loopscale.depth import make_law
from loopscale.errors import UsageError
from loopscale.model.ring import draws_at, works_at
from loopscale.parallel.ring.plan import Plan
from loopscale.plan.layout import Layout, by_stage
from loopscale.plan.timetable import idle_shares, kept_visits


def plan_report(
    config: Config, step: int = 0, nodes: int | None = None, per_node: int | None = None, drawing: Path | None = None
) -> str:
    """The plan of step ``step`` (0-based) in words, and drawn into the file ``drawing`` if that is given.

    Raises :class:`ConfigError` when the layout cannot be and :class:`UsageError` for a step or a file that cannot.
    """
    if step >= config.train.steps:
        raise UsageError(f"--step is {step}; the run has steps 0 to {config.train.steps - 1} (train.steps {config.train.steps})")
    if drawing is not None and not drawing.parent.is_dir():
        raise UsageError(f"--draw {drawing}: there is no folder {drawing.parent}")
    layout = Layout.of(config, nodes, per_node)
    law = make_law(config.depth)
    plan = layout.ring.plan(works_at(config, layout.batch, draws_at(config, layout.batch, law, step)))
    lines = _describe(layout, plan, step)
    if drawing is not None:
        from loopscale.plan.draw import draw

        draw(plan, drawing, layer=layer_time(layout), slices=layout.ring.slices)
        lines.append(f"drawn    {drawing}")
    return "\n".join([*lines, "ok       nothing was started"])


def layer_time(layout: Layout) -> float:
    """What one core layer's forward takes, in the unit of the plan's costs."""
    return 2 * layout.counts.core_matmul / layout.config.model.core_layers


def _describe(layout: Layout, plan: Plan, step: int) -> list[str]:
    depths = [work.depth for work in plan.work]
    b = max(work.gradient_visits for work in plan.work)
    microbatches, operations = _count(len(depths), "microbatch", "es"), sum(map(len, plan.operations))
    bound, layers = plan.makespan / plan.lower_bound(), plan.makespan / layer_time(layout)
    idle, kept = idle_shares(plan), [kept_visits(plan, stage) for stage in range(plan.stages)]
    timed = " (counted; the run will time them)" if layout.config.parallel.slices == "measured" else ""
    lines = [
        f"layout   {layout.sizes()} · {_count(layout.nodes * layout.per_node, 'rank')}",
        f"slices   {layout.describe_slices()}{timed}",
        f"step     {step} · {microbatches} of {_count(layout.batch.microbatch, 'sequence')} on each replica · "
        f"depth {_counted(depths)} · mean {sum(depths) / len(depths):.3g}",
        f"ring     at most {layout.in_flight} in flight · {operations:,} operations · plan {plan.digest()[:12]}",
        f"makespan {bound:.3f} × the lower bound · {layers:,.0f} forwards of a core layer, by counted operations",
        f"idle     {by_stage([f'{share:.1%}' for share in idle])}",
        f"kept     {by_stage([str(most) for most in kept])} · visits that await their backward, at most; "
        f"limit {layout.in_flight} in flight × {b} with gradient = {layout.in_flight * b}",
        f"traffic  {_traffic(layout, plan)}",
    ]
    if len(depths) < plan.stages:
        lines.append(
            f"note     {microbatches} on {plan.stages} stages: works; the idle share is {sum(idle) / plan.stages:.0%}; more "
            f"microbatches (batch.accumulation) would fill the ring"
        )
    return lines


def _traffic(layout: Layout, plan: Plan) -> str:
    """Bytes between stages: states and their gradients are fp32; where positions are divided, each rank sends its own."""
    if plan.stages == 1:
        return "none: one stage hands its states to itself"
    parallel = layout.config.parallel
    state = 4 * layout.config.model.hidden_size // (parallel.tensor if parallel.sequence_parallel else 1)
    messages = [plan.messages(stage) for stage in range(plan.stages)]
    sent = sum(len(m.states_sent) + len(m.gradients_sent) for m in messages) / len(plan.work)
    each = "" if parallel.tensor == 1 else f" on each of {parallel.tensor} tensor-parallel ranks"
    return (
        f"{state:,} bytes a token for every visit and hop{each}, and as many back where it carries gradient · "
        f"{plan.stages} hops round the ring · {state * sent:,.0f} bytes a token over the step"
    )


def _counted(depths: Iterable[int]) -> str:
    """As "2, 3 (×4), 7"."""
    return ", ".join(f"{depth} (×{n})" if n > 1 else f"{depth}" for depth, n in sorted(Counter(depths).items()))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
