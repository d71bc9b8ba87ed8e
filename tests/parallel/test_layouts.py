"""Five clipped AdamW steps on real ranks against one process: losses, every gradient and every weight.

The cases cover every pair of values of layout, preset, depths, gradient depth, objective and sequence parallelism that can
be together. The vocabulary has 101 tokens, so embeddings and heads are padded; documents leave unequal numbers of scored
tokens to the microbatches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from loopscale.config import Config, load, settle
from loopscale.config.tree import DepthConfig, ParallelConfig
from loopscale.corpus.batches import StepBatch, collate
from loopscale.corpus.packing import Sample, starts_of, targets_of
from loopscale.depth import make_prior
from loopscale.model.flops import count
from loopscale.model.ring import Ring
from loopscale.parallel.mesh import Mesh, gather_objects, sum_over_replicas, sum_over_tensor_ranks
from loopscale.train.dropped import first_bad, in_words
from loopscale.train.step import TrainStep
from tests.holding import gather_shares, split

TOLERANCE = 1e-5
ROUNDING = 2.0**-24
"""Of the whole gradient's norm: a gate's bias may have a gradient that cancels to next to nothing."""
VOCABULARY, LENGTH, GLOBAL_BATCH, STEPS = 101, 16, 8, 5

LAYOUTS = {
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "PP3": {"pipeline": 3},
    "PP4": {"pipeline": 4},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "PP2xDP2": {"pipeline": 2},
    "TP2xDP2": {"tensor": 2},
}
PRESETS = ("blindspot", "fixedpoint", "huginn", "parcae", "ouro", "dense")
UNINJECTED = ("blindspot", "ouro", "dense")
SHORT = ("fixedpoint", "parcae")
"""Designs with two core layers, which make three stages at most."""


class Case(NamedTuple):
    layout: str
    preset: str
    depths: str
    gradient: str
    objective: str
    sequence_parallel: bool

    @property
    def ranks(self) -> int:
        return {"TP2": 2, "PP2": 2, "PP3": 3}.get(self.layout, 4)

    @property
    def can_be(self) -> bool:
        if self.layout == "PP4" and self.preset in SHORT:
            return False
        dense = self.preset != "dense" or (self.depths, self.gradient, self.objective) == ("fixed", "all", "terminal")
        return dense and (self.gradient == "all" or self.preset not in UNINJECTED) and (
            not self.sequence_parallel or "TP" in self.layout
        )  # fmt: skip


def covering_cases() -> list[Case]:
    """Few cases that hold every possible pair: greedily the one with the most pairs that are still missing."""
    everything = itertools.product(
        LAYOUTS, PRESETS, ("fixed", "drawn"), ("all", "last"), ("terminal", "per_loop", "exit_gate"), (False, True)
    )
    possible = [case for case in itertools.starmap(Case, everything) if case.can_be]
    random.Random(0).shuffle(possible)  # a good order among equals

    def pairs(case: Case) -> set[tuple[tuple[int, object], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    missing, chosen = set[tuple[tuple[int, object], ...]]().union(*map(pairs, possible)), list[Case]()
    while missing:
        chosen.append(max(possible, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def configuration(case: Case) -> Config:
    """The preset's toy, smaller still, under the case's choices."""
    layers = 3 if case.layout == "PP4" else 2
    depth = 1 if case.preset == "dense" else 3
    overrides = {
        "corpus.sequence_length": LENGTH,
        "model.vocab_size": VOCABULARY,
        "model.hidden_size": 32,
        "model.heads": 4,
        "model.kv_heads": 4 if case.preset == "huginn" else 2,
        "model.ffn_size": 48,
        "model.core_layers": layers,
        "depth.prior": "fixed" if case.depths == "fixed" else "pln",
        "depth.mean": depth,
        "depth.cap": 5,
        "depth.groups": 2,
        "depth.per_sequence": case.preset == "parcae" and case.depths == "drawn" and case.objective == "terminal",
        "depth.backprop": 2 if case.gradient == "last" else "null",
        "objective.kind": case.objective,
        "objective.norm_penalty": 0.02 if case.preset in ("fixedpoint", "blindspot") else 0.0,
        "batch.global_batch": GLOBAL_BATCH,
        "batch.microbatch": 1 if case.layout in ("PP2", "PP2xDP2") else 2,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "optimizer.clip": 0.5,
        "optimizer.eps": 1e-4,  # or Adam makes a full step of the rounding of a gradient that is next to nothing
        "optimizer.warmup": 0.0,
        "train.steps": STEPS,
        "train.loss_chunk": 24,
        "train.recompute": "visit" if case.layout == "PP3" else "none",
        "parallel.zero": 0 if case.layout == "TP2xDP2" else 1,
        "parallel.sequence_parallel": str(case.sequence_parallel).lower(),
        **{f"parallel.{key}": size for key, size in LAYOUTS[case.layout].items()},
    }
    if case.preset == "ouro":  # branch norms would magnify rounding if branches were as small as 0.02 makes them at this width
        overrides["model.init_std"] = 0.16
        overrides["model.embedding_multiplier"] = 5.66
    if case.objective == "exit_gate":
        overrides["model.exit_gate"] = "normed" if case.preset == "ouro" else "raw"
    elif case.preset == "ouro":
        overrides["model.exit_gate"] = "none"
    if case.preset == "ouro" and case.objective != "exit_gate":
        overrides["objective.gate_entropy"] = 0.1
    text = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in overrides.items()]
    return load(Config, f"configs/run/toy-{case.preset}.yaml", text).config


def step_batch(config: Config, step: int, data_rank: int, data_size: int) -> StepBatch:
    """What a replica reads: random tokens in documents of random lengths, a function of the global sample."""
    batch = settle(config.batch, config.depth.groups, data_size)
    groups = []
    for g in range(batch.groups):
        begin = step * batch.global_batch + g * batch.group + data_rank * batch.group_per_rank
        stripe = range(begin, begin + batch.group_per_rank)
        groups.append(tuple(_microbatch(list(stripe[i : i + batch.microbatch])) for i in range(0, len(stripe), batch.microbatch)))
    return StepBatch(tuple(groups), step * batch.global_batch, (step + 1) * batch.global_batch)


def _microbatch(numbers: list[int]):
    samples = []
    for number in numbers:
        source = np.random.default_rng(number)
        tokens = source.integers(0, VOCABULARY, LENGTH + 1)
        boundaries = np.unique(source.integers(1, LENGTH + 1, source.integers(0, 4)))
        samples.append(Sample(*map(torch.from_numpy, (tokens, starts_of(tokens, boundaries), targets_of(tokens, boundaries)))))
    return collate(samples, numbers)


class _Given:
    """A depth law that gives each step its depth."""

    def __init__(self, depths: Sequence[int], steps: int):
        self._depths, self._steps = depths, steps

    def update(self, groups):
        """Given is given."""

    def digest(self) -> str:
        return str(self._depths)

    def at(self, progress: float):
        depth = self._depths[round(progress * self._steps) % len(self._depths)]
        return make_prior(DepthConfig(prior="fixed", mean=depth))


class Trace(NamedTuple):
    """What a run left: per step loss, norm of the gradient and the gradients themselves; the weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, NDArray]]
    weights: dict[str, NDArray]


def trace(mesh: Mesh, config: Config, steps: int = STEPS, depths: Sequence[int] = ()) -> Trace:
    """Runs ``steps`` steps and collects everything under global names, on every rank; ``depths`` stand for drawn ones."""
    batch = settle(config.batch, config.depth.groups, mesh.data_size)
    train = TrainStep(config, batch, Ring.of(config, count(config.model, LENGTH)), mesh)
    if depths:
        train.law = _Given(depths, config.train.steps)
    found = Trace([], [], [], {})
    apply = train.optimizer.step

    def recorded(rate: float) -> float:
        found.gradients.append(_global(mesh, train, _reduced(mesh, train)))
        return apply(rate)

    train.optimizer.step = recorded
    for step in range(steps):
        result = train(step, step_batch(config, step, mesh.data_rank, mesh.data_size))
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
    found.weights.update(_global(mesh, train, {h.parameter: p.detach() for h, p in train.stage.held()}))
    return found


def _reduced(mesh: Mesh, train: TrainStep) -> dict[str, torch.Tensor]:
    gradients = {}
    for holder, parameter in train.stage.held():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if mesh.sequence_parallel and holder.tensor_axis is None:
            sum_over_tensor_ranks(gradient)
        gradients[holder.parameter] = sum_over_replicas(gradient) / mesh.data_size
    return gradients


def _global(mesh: Mesh, train: TrainStep, held: dict[str, torch.Tensor]) -> dict[str, NDArray]:
    """Tensors of all stages under their global names; as arrays, which are pickled in no time."""
    own = {}
    for holder, _ in train.stage.held():
        shares = gather_shares(held[holder.parameter]) if holder.tensor_axis is not None else [held[holder.parameter]]
        own.update({name: whole.clone() for name, whole in split(holder, shares).items()})
    arrays = {name: tensor.numpy() for name, tensor in own.items()}
    return {name: array for part in gather_objects(arrays) for name, array in part.items()}


def relative(found: NDArray, expected: NDArray, least: float = 1e-30) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), least))


def alone(mesh: Mesh, config: Config) -> Trace:
    """The same run in one process."""
    return _alone(mesh, config.model_copy(update={"parallel": ParallelConfig(zero=config.parallel.zero)}).model_dump_json())


@cache
def _alone(mesh: Mesh, config_json: str) -> Trace:
    return trace(mesh, Config.model_validate_json(config_json))


def compare(found: Trace, expected: Trace) -> Iterator[tuple[str, float]]:
    """Relative differences, each with what differs."""
    for kind in ("losses", "norms"):
        for step, (ours, theirs) in enumerate(zip(getattr(found, kind), getattr(expected, kind), strict=True)):
            yield f"{kind} of step {step}", abs(ours - theirs) / abs(theirs)
    for step, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        least = expected.norms[step] * ROUNDING / TOLERANCE
        yield from ((f"gradient of {name} at step {step}", relative(ours[name], theirs[name], least)) for name in theirs)
    assert found.weights.keys() == expected.weights.keys()
    for name, theirs in expected.weights.items():
        least = 1e-2 if theirs.size == 1 else 1e-30  # a single number, moved by gradients that cancel
        yield f"weight {name}", relative(found.weights[name], theirs, least)


CASES = covering_cases()


def test_the_cases_are_few():
    assert len(CASES) <= 40


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_every_layout_gives_the_losses_gradients_and_weights_of_one_process(mesh, ranks, case):
    config = configuration(case)
    expected = alone(mesh, config)
    for found in ranks.run(trace, case.ranks, config, parallel=config.parallel):
        worst = max(compare(found, expected), key=lambda difference: difference[1])
        assert worst[1] <= TOLERANCE, worst


ZERO = {"0": {"zero": 0}, "1": {"zero": 1}, "offload": {"zero": 1, "offload_optimizer": True}}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("zero", "layout"),
    [(zero, layout) for zero, layout in itertools.product(ZERO, LAYOUTS) if zero != ("0" if layout == "TP2xDP2" else "1")],
)  # the cases above have the others
def test_however_optimizer_state_lies_the_weights_and_clip_norms_are_those_of_one_process(mesh, ranks, zero, layout):
    """A head of its own, or the embedding's, counts once in the norm wherever it lies."""
    config = configuration(Case(layout, "huginn", "drawn", "last", "per_loop", layout == "TP2xDP2"))
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"tied_head": zero == "0", "kv_heads": 2}),
            "parallel": config.parallel.model_copy(update=ZERO[zero]),
        }
    )
    expected = alone(mesh, config)
    assert max(expected.norms) > config.optimizer.clip
    for found in ranks.run(trace, Case(layout, *[""] * 4, False).ranks, config, parallel=config.parallel):
        worst = max(compare(found, expected), key=lambda difference: difference[1])
        assert worst[1] <= TOLERANCE, worst


def skipped(mesh: Mesh, config: Config) -> tuple[int, float | None, int, bool, str]:
    """(ranks that met it, gradient norm, applied steps, whether weights stayed, where it began) of a step in which the last
    rank finds NaN in one of its microbatches, in the gradient of queries, keys and values of the last core layer."""
    batch = settle(config.batch, config.depth.groups, mesh.data_size)
    train = TrainStep(config, batch, Ring.of(config, count(config.model, LENGTH)), mesh)
    before = [p.detach().clone() for p in train.stage.parameters()]
    uses = itertools.count(1)
    if mesh.rank == mesh.world - 1:
        *_, qkv = (p for n, p in train.stage.core_block.named_parameters() if "linear_qkv" in n)
        qkv.register_hook(lambda g: g * torch.nan if next(uses) == 2 else g)
    result = train(0, step_batch(config, 0, mesh.data_rank, mesh.data_size))
    stayed = all(torch.equal(a, b) for a, b in zip(before, train.stage.parameters(), strict=True))
    began = first_bad(result.ranks)
    assert began is not None
    return result.bad_ranks, result.grad_norm, train.optimizer.applied_steps, stayed, in_words(began)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["TP2xPP2", "PP2xDP2", "TP2xDP2"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_alike(mesh, ranks, layout):
    config = configuration(Case(layout, "huginn", "drawn", "last", "terminal", False))
    began = f"gradient of core.{config.model.core_layers - 1}.q on rank 3, stage {int('PP' in layout)}"
    assert ranks.run(skipped, 4, config, parallel=config.parallel) == [(1, None, 0, True, began)] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("recompute", ["none", "visit", "layer"])
@pytest.mark.parametrize("layout", ["PP2xDP2", "TP2xDP2"])
def test_depths_that_go_up_and_down_leave_no_gradient_behind(mesh, ranks, layout, recompute):
    """Stacks whose hooks count the uses of a weight in the first batch go wrong here, in silence."""
    config = configuration(Case(layout, "fixedpoint", "drawn", "last", "terminal", layout == "TP2xDP2"))
    config = config.model_copy(update={"train": config.train.model_copy(update={"recompute": recompute})})
    expected = trace(mesh, config.model_copy(update={"parallel": ParallelConfig()}), 4, (2, 2, 4, 1))
    found = ranks.run(trace, 4, config, 4, (2, 2, 4, 1), parallel=config.parallel)[-1]
    assert max(difference for _, difference in compare(found, expected)) <= TOLERANCE


@pytest.mark.ranks
@pytest.mark.parametrize(("stages", "microbatch"), [(2, 8), (4, 8), (4, 4)])
def test_fewer_microbatches_than_stages_run_too(mesh, ranks, stages, microbatch):
    config = configuration(Case("PP4", "huginn", "fixed", "last", "per_loop", False))
    update = {
        "batch": config.batch.model_copy(update={"microbatch": microbatch}),
        "depth": config.depth.model_copy(update={"groups": 1}),
    }
    config = config.model_copy(update=update | {"parallel": ParallelConfig(pipeline=stages)})
    expected = trace(mesh, config.model_copy(update={"parallel": ParallelConfig()}), 2)
    found = ranks.run(trace, stages, config, 2, parallel=config.parallel, timeout=60)[0]
    assert max(difference for _, difference in compare(found, expected)) <= TOLERANCE
