"""Bytes that the ranks of each stage will hold.

Counts follow what the code keeps: fp32 parameters and gradients; ZeRO's fp32 master copy and both moments, divided over
replicas at stage 1; the activations of all visits that can wait for their backward at once, or under recomputation those
of one and the states of the others; one chunk of logits with its gradient.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, prod

from loopscale.config.tree import ModelConfig
from loopscale.model.ring import work_of
from loopscale.model.weights import Holder, holders, padded_rows
from loopscale.plan.layout import Layout


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def predict_memory(layout: Layout) -> list[Memory]:
    """Peak bytes of a rank of each stage, home first, for the deepest gradient that the depth law allows."""
    config, model = layout.config, layout.config.model
    zero, tensor = config.parallel.zero, config.parallel.tensor
    parameters = stage_parameters(layout)
    copies = 3 if zero else 2  # ZeRO keeps an fp32 master of its part beside the two moments
    share = layout.batch.data_parallel if zero else 1
    tokens = layout.batch.microbatch * config.corpus.sequence_length
    rows = padded_rows(model.vocabulary, tensor) // tensor
    logits = 2 * 4 * min(config.train.loss_chunk, tokens) * rows + 4 * rows * model.hidden_size
    return [
        Memory(
            weights=4 * own,
            gradients=4 * own,
            optimizer=4 * copies * ceil(own / share),
            activations=_activations(layout, stage),
            logits=logits if stage == 0 else 0,
        )
        for stage, own in enumerate(parameters)
    ]


def stage_parameters(layout: Layout) -> list[int]:
    """Elements that a rank of each stage holds."""
    config = layout.config
    stage_of_layer = [s for s, own in enumerate(layout.ring.slices) for _ in range(own)]
    held = [0] * layout.stages
    for holder in holders(config.model, config.corpus.sequence_length):
        part, *where = holder.parameter.split(".")
        held[stage_of_layer[int(where[1])] if part == "core_block" else 0] += _elements(holder, config.parallel.tensor)
    return held


def _elements(holder: Holder, tensor: int) -> int:
    """Elements that each of ``tensor`` ranks holds of a parameter."""
    if holder.padded:
        rows, width = holder.weights[0].shape
        return padded_rows(rows, tensor) // tensor * width
    whole = sum(prod(weight.shape) for weight in holder.weights)
    return whole if holder.tensor_axis is None else whole // tensor


def _activations(layout: Layout, stage: int) -> int:
    """What a rank of ``stage`` keeps between operations, at most, and the coda's layers while they run.

    Home also keeps the prelude's graph of every microbatch in flight. A visit keeps its input, at home what the injection
    made of it, and its output, unless that is the next one's input.
    """
    config, model = layout.config, layout.config.model
    parallel, tokens = config.parallel, layout.batch.microbatch * config.corpus.sequence_length
    divided = parallel.tensor if parallel.sequence_parallel else 1
    state = tokens * model.hidden_size * 4 // divided
    layer = tokens * layer_activations(model, config.train.precision, parallel.tensor, divided)
    if config.train.precision == "bf16":  # each visit casts the matrices anew, and its backward needs the casts
        layer += 2 * _layer_matrices(model) // parallel.tensor
    home, one_stage = stage == 0, layout.stages == 1
    kept = layout.in_flight * work_of(config, config.depth.deepest).gradient_visits
    visit = layout.ring.slices[stage] * layer + (1 + home + (not one_stage)) * state
    visits = visit + kept * state if config.train.recompute == "visit" else kept * visit
    ends = (layout.in_flight * model.prelude_layers + model.coda_layers) * layer if home else 0
    return visits + ends + 2 * layout.in_flight * state


def layer_activations(model: ModelConfig, precision: str, tensor: int = 1, divided: int = 1) -> int:
    """Bytes that one layer keeps per token on each of ``tensor`` ranks; ``divided``: ranks that share its positions.

    Norms' inputs, in fp32 whatever the precision, and what enters attention and feed-forward; q, k, v twice (before and
    after rotation) and attention's output; SwiGLU's two branches, one of them twice, their activation and product, or
    ReLU's result and its square.
    """
    d, f, c = model.hidden_size, model.ffn_size, model.head_width
    q, kv = model.heads * c, model.key_value_heads * c
    width = 2 if precision == "bf16" else 4
    between = (4 * (2 if model.layer_norm == "pre" else 4) + 2 * width) * d
    inside = width * (2 * (q + 2 * kv) + q + (5 if model.activation == "swiglu" else 2) * f)
    if model.qk_norm and width < 4:
        inside += 4 * (q + kv)
    return between // divided + inside // tensor


def _layer_matrices(model: ModelConfig) -> int:
    """Elements of the matrices of one layer."""
    d, q, kv = model.hidden_size, model.heads * model.head_width, model.key_value_heads * model.head_width
    return d * (2 * q + 2 * kv + (3 if model.activation == "swiglu" else 2) * model.ffn_size)
