"""Our model says what the formats' own formulas say, of weights that went either way."""

from __future__ import annotations

import math

import pytest
import torch

from loopscale.config import Config, from_values
from loopscale.convert.formats import FORMATS
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.gate import exit_log_probabilities
from loopscale.randomness import normals, stream_key, truncated_normals
from tests.convert import references
from tests.convert.toys import LENGTH, VOCABULARY, config, weights
from tests.holding import join

TOLERANCE, DEPTHS, BATCH, SEED, SPREAD = 1e-4, (1, 2, 5), 2, 3, 0.12
OTHER_LAYOUT = {"rope_interleaved": False, "norm_centered": True}
CASES = [
    ("huginn", {}),
    ("huginn", {"qk_bias": False, "tied_head": False, "inject_bias": True, **OTHER_LAYOUT}),
    ("huginn", {"rope_interleaved": False}),
    ("ouro", {}),
    ("ouro", {"tied_head": True, "head_dim": 8, "rope_interleaved": True, "norm_centered": True}),
    ("parcae", {}),
    ("parcae", {"tied_head": False, "norm_eps": 1e-2, **OTHER_LAYOUT}),
    ("xllm", {}),
    ("xllm", {"inject": "parcae", "rope_interleaved": False, "norm_centered": False}),
    ("xllm", {"inject": "diagonal", "prelude_layers": 0, "coda_layers": 2}),
    ("xllm", {"inject": "huginn_linear", "inject_bias": True, "between": "unit"}),
]


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def first_state(of: Config) -> torch.Tensor:
    """As our model draws it, [B, S, d]."""
    place = stream_key(SEED, "evaluation"), torch.arange(LENGTH)[None], torch.arange(BATCH)[:, None], 0, of.model.hidden_size
    noise = truncated_normals(*place, cut=3.0) if of.model.state_init == "truncated_normal" else normals(*place)
    return noise.double() * of.model.noise_std


@torch.no_grad()
def ours(of: Config, own: dict[str, torch.Tensor], depth: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits [B, S, V] after every visit up to ``depth``, and the exit gate's log odds [B, S]."""
    stage = LoopedStage(of.model, LENGTH, seed=SEED, initialise=False)
    for holder, parameter in stage.held():
        parameter.copy_(join(holder, own))
    documents = Documents.whole(BATCH, LENGTH, torch.device("cpu"))
    inputs = Inputs(tokens(), tokens(), documents, torch.arange(BATCH), purpose="evaluation", final_visit=depth)
    feed, state, logits, gates = stage.prelude(inputs), None, [], []
    for r in range(1, depth + 1):
        state = stage.visit(inputs, feed, state, r)
        logits.append(stage.logits(stage.decode(inputs, state, r)).transpose(0, 1))
        if of.model.exit_gate != "none":
            gates.append(stage.gate_logits(state).T)
    return logits, gates


def assert_same(name: str, of: Config, own: dict[str, torch.Tensor], about: dict, theirs: dict[str, torch.Tensor]) -> None:
    """Ours of ``own`` and the reference of ``theirs``."""
    wide = {n: t.double() for n, t in theirs.items()}
    found, gates = ours(of, own, max(DEPTHS))
    for depth in DEPTHS:
        if name == "ouro":
            expected, leaving = references.ouro(wide, about, tokens(), depth)
            probabilities = exit_log_probabilities(torch.stack(gates[:depth])).exp()
            torch.testing.assert_close(probabilities.double(), leaving, rtol=0, atol=TOLERANCE)
        else:
            expected = [getattr(references, name)(wide, about, tokens(), depth, first_state(of))]
        for k, logits in enumerate(reversed(expected)):
            assert logits.abs().max() > 0.1
            torch.testing.assert_close(found[depth - 1 - k].double(), logits[..., :VOCABULARY], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_a_model_of_ours_is_theirs(mesh, name, changes):
    of, form = config(name, **changes), FORMATS[name]
    form.refuse_unfit(of)
    own, about = weights(of, spread=SPREAD), form.about(of)
    theirs = {r.theirs: r.out([own[p.weight.name] for p in r.parts]) for r in form.rules(of, about)}
    assert_same(name, of, own, about, theirs)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_a_model_of_theirs_is_ours(mesh, name, changes):
    form, about = FORMATS[name], FORMATS[name].about(config(name, **changes))
    of = from_values(Config, {"batch": {"global_batch": 1}, **form.values(about)}).config
    rules, generator = form.rules(of, about), torch.Generator().manual_seed(2)
    theirs = {rule.theirs: torch.randn(rule.shape, generator=generator) * SPREAD for rule in rules}
    own = {p.weight.name: t for r in rules for p, t in zip(r.parts, r.back(theirs[r.theirs]), strict=True)}
    assert_same(name, of, own, about, theirs)


def test_a_head_of_parcae_has_an_epsilon_of_its_own(mesh):
    """A toy whose queries and keys are small: with the epsilon of the other norms it would be another model."""
    of, form = config("parcae"), FORMATS["parcae"]
    own = {n: t * (0.01 if n.endswith((".q", ".k")) else 1.0) for n, t in weights(of, spread=SPREAD).items()}
    theirs = {r.theirs: r.out([own[p.weight.name] for p in r.parts]) for r in form.rules(of, form.about(of))}
    assert_same("parcae", of, own, form.about(of), theirs)
    wide = {n: t.double() for n, t in theirs.items()}
    right = references.parcae(wide, form.about(of), tokens(), 2, first_state(of))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "PARCAE_HEAD_EPS", of.model.norm_eps)
        other = references.parcae(wide, form.about(of), tokens(), 2, first_state(of))
    assert not math.isclose(float((right - other).abs().max()), 0, abs_tol=10 * TOLERANCE)
