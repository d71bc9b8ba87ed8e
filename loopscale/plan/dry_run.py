"""``loopscale train --dry-run``: rank layout, batch arithmetic, parameters, memory per rank. Starts nothing."""

from __future__ import annotations

import torch

from loopscale.config import Config
from loopscale.depth import make_prior
from loopscale.environment.compute import compute_type
from loopscale.model.flops import training_flops
from loopscale.model.memory import Memory, predict_memory
from loopscale.model.ring import work_of
from loopscale.objective.supervision import GATED
from loopscale.plan.layout import Layout, by_stage, stages_named
from loopscale.train.banner import quantity, sizes

_GIB = 2**30


def dry_run(config: Config, nodes: int | None = None, per_node: int | None = None, gpus: bool | None = None) -> str:
    """The report for ``nodes`` × ``per_node`` ranks, on GPUs or not (None: as here); raises :class:`ConfigError` when the layout
    cannot be."""
    layout = Layout.of(config, nodes, per_node)
    batch, prior, depth, length = layout.batch, make_prior(config.depth), config.depth, config.corpus.sequence_length
    tokens = batch.global_batch * length
    law = list(enumerate(prior.probabilities, 1))
    gated = config.objective.kind in GATED
    flops = sum(p * training_flops(layout.counts, work_of(config, r), gated) for r, p in law)
    truncated = sum(p for r, p in law if r > depth.gradient_visits(r))
    lines = [
        f"model    {sizes(layout.counts, depth.evaluation_depth)} · {flops / 1e9:.3g} GFLOP a token (prior mean)",
        f"layout   {layout.sizes()} · ZeRO-{config.parallel.zero} · {_stages(layout)} · {_ranks(layout)}",
        *([f"slices   {layout.describe_slices()}"] if layout.stages > 1 else []),
        f"ranks    {layout.describe_ranks()}",
        f"batch    {batch.global_batch} sequences × {length:,} = {tokens:,} tokens a step · {batch.groups} depth "
        f"group{'s' * (batch.groups > 1)} of {batch.group}, {batch.group_per_rank} per replica · microbatch {batch.microbatch}, "
        f"{batch.accumulation} a step",
        f"steps    {config.train.steps:,} = {quantity(tokens * config.train.steps)} tokens",
        f"depth    {prior.name} · mean {prior.mean:.3g} · entropy {prior.entropy + 0:.3g} nats · {truncated:.1%} beyond backprop",
        *_memory(layout, torch.cuda.is_available() if gpus is None else gpus),
        "ok       nothing was started",
    ]
    return "\n".join(lines)


def _stages(layout: Layout) -> str:
    if layout.stages == 1:
        return "one stage"
    behind = layout.stages - 1
    return f"home + {behind} slice{'s' * (behind > 1)} · {layout.in_flight} microbatches in flight"


def _ranks(layout: Layout) -> str:
    ranks = layout.nodes * layout.per_node
    nodes = f" on {layout.nodes} nodes of {layout.per_node}" if layout.nodes > 1 else ""
    return f"{ranks} rank{'s' * (ranks > 1)}{nodes}"


def _memory(layout: Layout, gpus: bool) -> list[str]:
    """The rank that holds most, and with several stages one of each."""
    config = layout.config
    device = torch.device("cuda" if gpus else "cpu")
    compute = compute_type(config, device)
    stages = predict_memory(config, layout.batch, layout.ring, device, compute)
    heaviest = max(range(layout.stages), key=lambda s: stages[s].peak)
    kinds = "  ".join(f"{kind} {size / _GIB:.2f}" for kind, size in _summands(stages[heaviest]).items())
    where = "per rank" if layout.stages == 1 else f"per rank of {stages_named([heaviest])}, the heaviest stage"
    assumed = f", for {'GPUs' if device.type == 'cuda' else 'CPUs'}" if config.train.precision == "auto" else ""
    precision = f"visits in {'bf16' if compute == torch.bfloat16 else 'fp32'}{assumed}"
    lines = [f"memory   {where}: {kinds}  = {stages[heaviest].peak / _GIB:.2f} GiB · {precision}"]
    if stages[heaviest].optimizer_cpu:
        lines[0] += f" · optimizer in CPU memory {stages[heaviest].optimizer_cpu / _GIB:.2f}"
    if layout.stages > 1:
        lines.append(f"         by stage, GiB: {by_stage([f'{memory.peak / _GIB:.2f}' for memory in stages])}")
    return lines


def _summands(memory: Memory) -> dict[str, int]:
    """What adds up to the peak: it comes either while the ring runs or in the update."""
    kept = {kind: getattr(memory, kind) for kind in ("parameters", "gradients", "optimizer", "buffers")}
    ring = {"activations": memory.activations, "logits": memory.logits}
    return kept | (ring if sum(ring.values()) >= memory.update else {"update": memory.update})
