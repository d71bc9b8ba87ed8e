"""``loopscale train --dry-run``: rank layout, batch arithmetic, parameters, memory per rank. Starts nothing.

Byte counts follow what the code keeps: fp32 parameters and gradients; ZeRO's fp32 master copy and both
moments, divided over data-parallel ranks at stage 1; per microbatch the activations of b visits, or of one visit and b
states under recomputation; one chunk of logits with its gradient.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from loopscale.config import Batch, Config, settle
from loopscale.config.tree import ModelConfig
from loopscale.depth import make_prior
from loopscale.errors import ConfigError, Problem
from loopscale.model.flops import count, training_flops
from loopscale.objective.supervision import GATED, exits
from loopscale.parallel.ring.plan import Work
from loopscale.train.banner import quantity, sizes

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int


def dry_run(config: Config, nodes: int, per_node: int) -> str:
    """The report for ``nodes`` × ``per_node`` processes; raises :class:`ConfigError` when the layout cannot be."""
    world = nodes * per_node
    model = config.model.model_copy(update={"vocab_size": _vocabulary(config)})
    data_parallel = world // (config.parallel.tensor * config.parallel.pipeline)
    batch = settle(config.batch, config.depth.groups, data_parallel)
    prior, depth, length = make_prior(config.depth), config.depth, config.corpus.sequence_length
    counts, memory = count(model, length), predict_memory(config, model, batch)
    tokens = batch.global_batch * length
    law = enumerate(prior.probabilities, 1)
    flops = sum(p * training_flops(counts, _work(config, r), config.objective.kind in GATED) for r, p in law)
    truncated = sum(p for r, p in enumerate(prior.probabilities, 1) if r > depth.gradient_visits(r))
    gib = {kind: size / _GIB for kind, size in asdict(memory).items()}
    lines = [
        f"model    {sizes(counts, depth.evaluation_depth)} · {flops / 1e9:.3g} GFLOP a token (prior mean)",
        f"layout   DP {data_parallel} · ZeRO-{config.parallel.zero} · one stage · {_ranks(world, per_node)}",
        f"batch    {batch.global_batch} sequences × {length:,} = {tokens:,} tokens a step · {batch.groups} depth groups of "
        f"{batch.group}, {batch.group_per_rank} per rank · microbatch {batch.microbatch}, {batch.accumulation} a step",
        f"steps    {config.train.steps:,} = {quantity(tokens * config.train.steps)} tokens",
        f"depth    {prior.name} · mean {prior.mean:.3g} · entropy {prior.entropy:.3g} nats · {truncated:.1%} beyond backprop",
        f"memory   per rank: {'  '.join(f'{k} {v:.2f}' for k, v in gib.items())}  = {sum(gib.values()):.2f} GiB",
        "ok       nothing was started",
    ]
    return "\n".join(lines)


def predict_memory(config: Config, model: ModelConfig, batch: Batch) -> Memory:
    """Peak bytes of one rank, by kind, for the deepest gradient that the depth law allows."""
    length, depth = config.corpus.sequence_length, config.depth
    parameters = count(model, length).total
    share = batch.data_parallel if config.parallel.zero == 1 else 1
    state_copies = 3 if config.parallel.zero == 1 else 2  # ZeRO keeps an fp32 master of its part beside the two moments
    visits = depth.gradient_visits(depth.deepest)
    width = 2 if config.train.precision == "bf16" else 4
    tokens = batch.microbatch * length
    state = tokens * model.hidden_size * 4
    visit = model.core_layers * _layer_activations(model, width) * tokens + state
    ends = max(model.prelude_layers, model.coda_layers) * _layer_activations(model, width) * tokens
    kept = visit + visits * state if config.train.recompute == "visit" else visits * visit
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=4 * state_copies * ceil(parameters / share),
        activations=kept + ends + 2 * state,
        logits=2 * 4 * min(config.train.loss_chunk, tokens) * model.vocabulary + 4 * model.vocabulary * model.hidden_size,
    )


def _work(config: Config, depth: int) -> Work:
    b = config.depth.gradient_visits(depth)
    return Work(depth, b, tuple(e.visit for e in exits(config.objective, depth, b)))


def _layer_activations(model: ModelConfig, width: int) -> int:
    """Bytes that one layer keeps per token: norms' inputs and outputs, q, k, v twice (before and after rotation),
    attention's output, both feed-forward branches, their activation and product."""
    d, f, c = model.hidden_size, model.ffn_size, model.head_width
    q, kv = model.heads * c, model.key_value_heads * c
    return width * (4 * d + 2 * (q + 2 * kv) + q + 4 * f)


def _vocabulary(config: Config) -> int:
    from loopscale.corpus.folder import open_corpus
    from loopscale.errors import DataError, UsageError

    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        return open_corpus(config.corpus.path, config.corpus.cache).vocab_size
    except (UsageError, DataError) as error:
        sentence = f"must be given, since the corpus cannot tell it ({error})"
        raise ConfigError("--dry-run", [Problem("model.vocab_size", sentence)]) from None


def _ranks(world: int, per_node: int) -> str:
    """Which ranks sit where, shortened for many."""
    shown = [f"node {n}: ranks {n * per_node}–{(n + 1) * per_node - 1}" for n in range(min(world // per_node, 3))]
    return "data-parallel " + ", ".join(shown) + (" …" if world // per_node > 3 else "")
