# ruff: noqa: E501  (tables of designs read better one property a line)
"""Every published design, shrunk, against the plain reference in float64; and random points of the model space."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscale.config import Config, from_values
from loopscale.config.tree import ModelConfig, ObjectiveConfig
from loopscale.errors import ConfigError
from loopscale.model.inputs import Inputs
from loopscale.objective.supervision import carried_visits, exits
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.plan import plan
from loopscale.randomness import normals, stream_key, truncated_normals, uniforms
from tests import reference
from tests.holding import split
from tests.model.test_stage import BATCH, LENGTH, SEED, STEP, TOLERANCE, VOCABULARY, example, perturb, relative

SMALL = {"hidden_size": 40, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "blindspot": {
        "prelude_layers": 0, "core_layers": 2, "coda_layers": 0, "inject": "none", "state_init": "embedding",
        "positions": "learned", "tied_head": True, "norm_centered": False, "init_scheme": "pytorch", "embedding_dropout": 0.1, "kv_heads": 4,
    },
    "blindspot-raw-normed-between": {
        "prelude_layers": 0, "core_layers": 2, "coda_layers": 0, "inject": "none", "state_init": "embedding", "readout": "raw",
        "between": "rmsnorm", "positions": "learned",
    },
    "blindspot-final-only-damped": {
        "prelude_layers": 0, "core_layers": 2, "coda_layers": 0, "inject": "none", "state_init": "embedding",
        "readout": "final_only", "between": "damping", "exit_gate": "raw",
    },
    "fixedpoint": {},
    "fixedpoint-diagonal": {"inject": "diagonal"},
    "fixedpoint-linear-bias": {"inject": "huginn_linear", "inject_bias": True, "state_init": "zero"},
    "huginn": {
        "prelude_layers": 2, "core_layers": 3, "coda_layers": 2, "layer_norm": "sandwich", "coda_norm": True, "tied_head": True,
        "inject": "huginn_linear", "qk_bias": True, "embedding_multiplier": 40**0.5, "state_init": "truncated_normal",
        "state_std": 0.4**0.5, "init_scheme": "scaled", "init_depth": 132, "norm_centered": False,
    },
    "parcae": {
        "prelude_layers": 2, "core_layers": 2, "coda_layers": 2, "inject": "parcae", "activation": "relu2", "qk_norm": True,
        "value_embeddings": True, "coda_linear": True, "tied_head": True, "norm_eps": 1e-5, "init_scheme": "scaled_zero",
        "state_init": "truncated_normal", "norm_centered": False,
    },
    "unit-with-linear": {"between": "unit", "inject": "huginn_linear", "inject_bias": True},
    "shared-with-coda": {"between": "shared", "coda_linear": True, "norm_centered": False},
    "ouro": {
        "prelude_layers": 0, "core_layers": 3, "coda_layers": 0, "inject": "none", "state_init": "embedding",
        "layer_norm": "branch", "between": "shared", "exit_gate": "normed", "rope_interleaved": False, "norm_centered": False, "kv_heads": 4,
    },
    "alpha": {"readout": "alpha", "state_init": "embedding"},
    "dense": {"prelude_layers": 0, "core_layers": 4, "coda_layers": 0, "inject": "none", "state_init": "embedding"},
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, Any]] = {
    "terminal": {},
    "per_loop-weighted": {"kind": "per_loop", "loop_weights": (1.0, 2.0, 3.0, 4.0)},
    "terminal-penalty": {"norm_penalty": 0.05, "anchor": 0.3, "anchor_target": 0.7},
    "per_loop-penalty": {"kind": "per_loop", "norm_penalty": 0.01},
    "gate": {"kind": "exit_gate", "gate_entropy": 0.07, "norm_penalty": 0.01},
    "gate-stage2": {"kind": "exit_gate_stage2"},
}


def build(family: str, objective: ObjectiveConfig):
    from loopscale.model.stage import LoopedStage

    model = ModelConfig(vocab_size=VOCABULARY, **{**SMALL, **FAMILIES[family]})
    return LoopedStage(model, LENGTH, seed=SEED, objective=objective, loss_chunk=16)


def spec_of(model: ModelConfig) -> reference.Spec:
    same = set(reference.Spec.__dataclass_fields__) - {"kv_heads", "head_dim", "prelude", "core", "coda"}
    return reference.Spec(
        kv_heads=model.key_value_heads, head_dim=model.head_width, prelude=model.prelude_layers, core=model.core_layers,
        coda=model.coda_layers, **{name: getattr(model, name) for name in same},
    )  # fmt: skip


def keyed(purpose: str, width: int, inputs: Inputs, draw) -> torch.Tensor:
    """Values [B, S, width] keyed as the product keys them."""
    return draw(stream_key(SEED, purpose), torch.arange(LENGTH)[None], inputs.samples[:, None], STEP, width).double()


def initial_state(model: ModelConfig, inputs: Inputs) -> torch.Tensor | None:
    if model.state_init == "normal":
        return keyed("state", model.hidden_size, inputs, normals) * model.noise_std
    if model.state_init == "truncated_normal":
        return keyed("state", model.hidden_size, inputs, lambda *place: truncated_normals(*place, cut=3.0)) * model.noise_std
    return None


def dropout(model: ModelConfig, inputs: Inputs) -> torch.Tensor | None:
    p = model.embedding_dropout
    return (keyed("dropout", model.hidden_size, inputs, uniforms) > p).double() / (1 - p) if p else None


def expected_loss(weights, stage, inputs, starts, objective: ObjectiveConfig, depth: int, b: int, first=None) -> torch.Tensor:
    model = stage.model
    return reference.loss(
        weights, spec_of(model), inputs.tokens, starts, initial_state(model, inputs), inputs.targets, objective.kind, depth, b,
        loop_weights=objective.loop_weights, gate_entropy=objective.gate_entropy, norm_penalty=objective.norm_penalty,
        anchor=objective.anchor, anchor_target=objective.anchor_target, first_visit=first, dropout=dropout(model, inputs),
    )  # fmt: skip


def run(stage, inputs: Inputs, objective: ObjectiveConfig, depth: int, b: int):
    valid = int((inputs.targets != -100).sum())
    task = Task(inputs, depth, carried_visits(objective, b), exits(objective, depth, b), 1 / valid, 1 / BATCH)
    return execute(plan(1, [task.work], in_flight=1), stage, [task], Links.alone())[0]


def fits(family: str, objective: str, depth: int, b: int) -> bool:
    gated = FAMILIES[family].get("exit_gate", "none") != "none"
    bound = (family != "dense" or depth == 1) and not (objective == "gate-stage2" and depth == 1)  # one exit: nothing to learn
    return (gated or "gate" not in objective) and (FAMILIES[family].get("inject") != "none" or b == depth) and bound


CASES = [
    (family, objective, depth, b)
    for family in FAMILIES
    for objective in OBJECTIVES
    for depth, b in ((4, 4), (5, 2), (1, 1))
    if fits(family, objective, depth, b)
]


@pytest.mark.parametrize(("family", "objective", "depth", "b"), CASES)
def test_loss_and_every_gradient_agree_with_the_reference(mesh, family, objective, depth, b):
    config = ObjectiveConfig(**OBJECTIVES[objective])
    stage = build(family, config)
    weights = perturb(stage)
    inputs, starts = example("packed")
    inputs = Inputs(**{**inputs.__dict__, "final_visit": depth})
    outcome = run(stage, inputs, config, depth, b)
    expected = expected_loss(weights, stage, inputs, starts, config, depth, b)
    expected.backward()
    assert sum(t.item() for t in outcome.terms.values()) == pytest.approx(expected.item(), rel=TOLERANCE, abs=1e-9)
    for holder, parameter in stage.held():
        for name, gradient in split(holder, [_or_zeros(parameter)]).items():
            wanted = _or_zeros(weights[name])
            assert relative(gradient, wanted) <= TOLERANCE or gradient.norm() + wanted.norm() < 1e-9, name


def _or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("family", ["parcae", "fixedpoint", "huginn", "alpha"])
def test_per_sequence_depths_give_the_gradients_of_each_sequence_alone(mesh, family):
    """Depths 2, 5, 4 end together; the sum of the gradients of three runs of one sequence each is the same."""
    config, depths = ObjectiveConfig(norm_penalty=0.02), (2, 5, 4)
    stage = build(family, config)
    weights = perturb(stage)
    inputs, starts = example("packed")
    first = torch.tensor([max(depths) - r + 1 for r in depths])
    together = Inputs(**{**inputs.__dict__, "final_visit": 5, "first_visits": first})
    run(stage, together, config, 5, 5)
    found = {holder.parameter: parameter.grad.clone() for holder, parameter in stage.held()}
    expected_loss(weights, stage, together, starts, config, 5, 5, first).backward()
    for holder, _ in stage.held():
        for name, gradient in split(holder, [found[holder.parameter]]).items():
            assert relative(gradient, weights[name].grad) <= TOLERANCE, name

    stage.zero_grad()
    valid = int((inputs.targets != -100).sum())
    for row, depth in enumerate(depths):
        own = type(inputs.documents)(_row_boundaries(inputs, row), 1, LENGTH)
        part = Inputs(
            inputs.tokens[row : row + 1],
            inputs.targets[row : row + 1],
            own,
            inputs.samples[row : row + 1],
            STEP,
            final_visit=depth,
        )
        task = Task(part, depth, depth, exits(config, depth, depth), 1 / valid, 1 / BATCH)
        execute(plan(1, [task.work], in_flight=1), stage, [task], Links.alone())
    for holder, parameter in stage.held():
        assert relative(found[holder.parameter], parameter.grad.double()) <= TOLERANCE, holder.parameter


def _row_boundaries(inputs: Inputs, row: int) -> torch.Tensor:
    bounds = inputs.documents.boundaries
    inside = bounds[(bounds >= row * LENGTH) & (bounds <= (row + 1) * LENGTH)] - row * LENGTH
    return inside.to(torch.int32)


choice = st.sampled_from
POINT = st.fixed_dictionaries(
    {
        "prelude_layers": st.integers(0, 2), "core_layers": st.integers(1, 2), "coda_layers": st.integers(0, 2),
        "hidden_size": choice([8, 40]), "heads": choice([1, 2, 4]), "kv_heads": choice([None, 1, 2]), "ffn_size": choice([1, 24]),
        "activation": choice(["swiglu", "relu2"]), "layer_norm": choice(["pre", "sandwich", "branch"]), "qk_norm": st.booleans(),
        "qk_bias": st.booleans(), "value_embeddings": st.booleans(), "embedding_multiplier": choice([1.0, 6.0]),
        "embedding_dropout": choice([0.0, 0.2]), "inject": choice(["none", "add", "huginn_linear", "diagonal", "parcae", "ortho"]),
        "inject_bias": st.booleans(), "state_init": choice(["zero", "embedding", "normal", "truncated_normal"]),
        "between": choice(["none", "rmsnorm", "damping", "shared", "unit"]), "coda_linear": st.booleans(), "coda_norm": st.booleans(),
        "readout": choice(["rmsnorm", "raw", "final_only", "alpha"]), "tied_head": st.booleans(),
        "exit_gate": choice(["none", "none", "raw", "normed"]), "positions": choice(["rope", "learned"]),
        "rope_interleaved": st.booleans(), "norm_centered": st.booleans(),
        "init_scheme": choice(["normal", "pytorch", "scaled", "scaled_zero"]),
    }
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(model=POINT, objective=choice(list(OBJECTIVES)), depth=st.integers(1, 4), b=st.integers(1, 4))
def test_any_point_of_the_space_runs_or_is_refused_with_a_sentence(mesh, model, objective, depth, b):
    values = {
        "model": {**model, "vocab_size": VOCABULARY},
        "depth": {"prior": "fixed", "mean": float(depth), "backprop": b},
        "objective": OBJECTIVES[objective],
        "batch": {"global_batch": BATCH},
    }
    try:
        config = from_values(Config, values).config
    except ConfigError as refused:
        assert all(len(p.sentence) > 10 for p in refused.problems)
        return
    from loopscale.model.stage import LoopedStage

    stage = LoopedStage(config.model, LENGTH, seed=SEED, objective=config.objective, loss_chunk=50)
    inputs, _ = example("packed")
    inputs = Inputs(**{**inputs.__dict__, "final_visit": depth})
    outcome = run(stage, inputs, config.objective, depth, config.depth.gradient_visits(depth))
    assert all(torch.isfinite(t) for t in outcome.terms.values())
    reached = [p.grad for _, p in stage.held() if p.grad is not None]
    assert reached
    assert all(torch.isfinite(g).all() for g in reached)
