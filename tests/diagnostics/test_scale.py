"""Scale and direction of the state: formulas and lemmas of the blind spot, on toys and on the model; layouts agree."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscale.config import Config, from_values, settle
from loopscale.config.tree import ModelConfig, ParallelConfig
from loopscale.diagnostics.scale import (
    FACTORS,
    ScaleMeter,
    at_scale_of,
    clamped_losses,
    exit_gradient,
    motion,
    radial_fractions,
    token_correlations,
    without_radial_part,
)
from loopscale.evaluate.scale import Scale, diagnose
from loopscale.model.flops import count
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.ring import Ring
from loopscale.objective.supervision import Exit
from loopscale.parallel.mesh import Mesh
from loopscale.parallel.ring.execute import ExitLoss
from loopscale.train.step import TrainStep

V, S, B, D = 101, 16, 3, 64
BARE = {"inject": "none", "state_init": "embedding", "prelude_layers": 0, "core_layers": 2, "coda_layers": 0}
SIZES = {"vocab_size": V, "hidden_size": D, "heads": 4, "kv_heads": 2, "ffn_size": 48, "init_std": 0.1}


def build(readout: str, **more):
    from loopscale.model.stage import LoopedStage

    return LoopedStage(ModelConfig(**BARE, **SIZES, readout=readout), S, seed=3, **more)


def example() -> Inputs:
    tokens = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -100
    documents = Documents.whole(B, S, torch.device("cpu"))
    return Inputs(tokens[:, :-1], targets, documents, torch.arange(B), purpose="evaluation", final_visit=4)


def states(rms: float) -> Tensor:
    h = torch.randn(S, B, D, generator=torch.Generator().manual_seed(1))
    return rms * h / h.square().mean(-1, keepdim=True).sqrt()


def fraction(stage, rms: float) -> float:
    h = states(rms)
    return radial_fractions(h, exit_gradient(stage, example(), h, 4)).mean().item()


# ---- what a loss sees


def test_the_gradient_is_that_of_the_formula_and_unscored_tokens_are_left_out(mesh):
    stage, inputs, h = build("raw"), example(), states(2.0)
    weight, targets = stage.head_weight[:V].detach().double(), inputs.targets.t()
    expected = (h.double() @ weight.t()).softmax(-1) - F.one_hot(targets.clamp(min=0), V)
    expected = expected @ weight * (targets >= 0)[..., None]
    gradient = exit_gradient(stage, inputs, h, 4)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)
    cosines = F.cosine_similarity(expected, h.double(), dim=-1)[targets >= 0].abs()
    found = radial_fractions(h, gradient)
    assert len(found) == B * S - 5
    torch.testing.assert_close(found, cosines, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("readout", ["raw", "alpha"])
def test_a_raw_readout_sees_the_scale(mesh, readout):
    assert all(fraction(build(readout), rms) > 1e-3 for rms in (0.1, 1.0, 30.0))


def test_a_norm_hides_the_scale_but_for_its_eps(mesh):
    stage, eps = build("rmsnorm"), ModelConfig().norm_eps
    assert all(fraction(stage, rms) < 1e-6 for rms in (1.0, 3.0, 100.0))
    small = [1e-1, 3e-2, 1e-2, 3e-3, 1e-3]
    per_eps = [fraction(stage, rms) * (rms**2 + eps) / eps for rms in small]  # eps / RMS² where RMS² is well above eps
    assert per_eps[:3] == pytest.approx([per_eps[1]] * 3, rel=0.03)
    assert per_eps == pytest.approx([per_eps[1]] * 5, rel=0.25)  # at RMS² = eps, less of the norm is left to see


def test_bf16_would_see_what_is_not_there(mesh):
    """Rounding to bf16 turns a gradient off the sphere; ours is the same whatever visits compute in."""
    stage, h, inputs = build("rmsnorm"), states(1.0), example()
    leaf, weight = h.bfloat16().requires_grad_(), stage.head_weight.detach().bfloat16()
    F.cross_entropy((F.rms_norm(leaf, (D,)) @ weight.t()).float().flatten(0, 1), inputs.targets.t().flatten()).backward()
    assert radial_fractions(leaf.detach(), leaf.grad).mean() > 1e-5
    config, ring, inputs = toy("rmsnorm")
    found = []
    for compute in (torch.float32, torch.bfloat16):
        stage = built(config, ring, mesh)
        stage.compute = compute
        found.append(diagnose(stage, ring, mesh, config, inputs).sight.radial_fractions)
        assert stage.compute == compute
    assert found[0] == found[1]
    assert max(found[0]) < 1e-6


def test_a_readout_without_scale_does_not_hear_a_factor_and_a_raw_one_does(mesh):
    def changes(readout: str) -> list[float]:
        config, ring, inputs = toy(readout)
        found = diagnose(built(config, ring, mesh), ring, mesh, config, inputs)
        assert tuple(found.sight.scaled_losses) == FACTORS
        assert found.sight.scaled_losses[1.0] == found.loss
        return [abs(loss - found.loss) for factor, loss in found.sight.scaled_losses.items() if factor != 1]

    assert max(changes("rmsnorm")) < 1e-4
    assert min(changes("raw")) > 1e-3


# ---- how scale and direction move


def test_motion_of_known_vectors():
    before = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]], [[1.0, 1.0]]])
    after = torch.tensor([[[0.0, 4.0]], [[0.0, 5.0]], [[1.0, 1.0]]])
    growth, predicted, angle, angle_predicted = motion(before, after).squeeze(-1).tolist()
    assert growth == pytest.approx([2, 2, 0])
    assert predicted == pytest.approx([-2, 2, 0])
    assert angle == pytest.approx([math.pi / 2, 0, 0], abs=1e-7)
    assert angle_predicted == pytest.approx([2, 0, 0], abs=1e-7)


def test_lemma_2_holds_to_the_order_it_says():
    """F(h) = h + B(norm h): the scale misses its prediction by O(1/s), the direction by O(1/s²)."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(D, D, generator=generator, dtype=torch.float64) / D**0.5 for _ in range(2))
    unit = F.normalize(torch.randn(32, 1, D, generator=generator, dtype=torch.float64), dim=-1)
    scales = torch.logspace(1, 4, 13, dtype=torch.float64)
    missed = []
    for s in scales:
        h = s * unit
        after = h + torch.tanh(F.rms_norm(h, (D,)) @ first) @ second / 2
        growth, growth_predicted, angle, angle_predicted = motion(h, after)
        missed.append(((growth - growth_predicted).abs().mean(), (angle - angle_predicted).abs().mean()))
    x = scales.log() - scales.log().mean()
    slopes = (x[:, None] * torch.tensor(missed, dtype=torch.float64).log()).sum(0) / x.square().sum()
    assert slopes.tolist() == [pytest.approx(-1, abs=0.1), pytest.approx(-2, abs=0.1)]


def test_token_correlation_of_equal_opposite_and_orthogonal_tokens(mesh):
    one, other = torch.eye(4)[:2]
    equal, orthogonal = torch.stack([one, 5 * one, one]), torch.eye(4)[:3]
    mixed = torch.stack([one, 2 * one, other])  # one pair of three
    found = token_correlations(torch.stack([equal, orthogonal, mixed], dim=1), mesh)
    assert found.tolist() == pytest.approx([1, 0, 1 / 3], abs=1e-7)
    assert token_correlations(torch.stack([one, -one])[:, None], mesh).tolist() == pytest.approx([-1])
    h = torch.randn(S, 1, D, generator=torch.Generator().manual_seed(2))
    pairs = F.cosine_similarity(h.squeeze(1)[:, None], h.squeeze(1)[None], dim=-1)
    assert token_correlations(h, mesh).item() == pytest.approx(((pairs.sum() - S) / (S * (S - 1))).item(), abs=1e-6)


# ---- clamps


def test_a_clamp_keeps_the_scale_of_the_first_loop_and_the_other_only_turns():
    first, before, after = states(1.0), states(3.0), 2 * states(3.0).roll(1, 0)
    held = at_scale_of(first, before, after)
    torch.testing.assert_close(held.norm(dim=-1), first.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(F.cosine_similarity(held, after, dim=-1), torch.ones(S, B))
    moved = without_radial_part(first, before, after) - before
    assert (moved * before).sum(-1).abs().max() < 1e-3 * before.square().sum(-1).min()
    parts = after - before - moved  # what is gone lies along the state before
    assert F.cosine_similarity(parts, before, dim=-1).abs().min() > 1 - 1e-5


class Doubling:
    """h → 2 h + (0, 1) per token, from (3, 0) after the first visit; the loss of a token is its first coordinate."""

    def prelude(self, inputs: None) -> tuple[Tensor, ...]:
        return ()

    def visit(self, inputs: None, feed: tuple[Tensor, ...], state: Tensor | None, visit: int) -> Tensor:
        start = torch.tensor([3.0, 0.0]).expand(S, 1, 2)
        return start if state is None else 2 * state + torch.tensor([0.0, 1.0])

    def exit(self, inputs: None, exit: Exit, states) -> ExitLoss:
        return ExitLoss({}, {}, states[exit.visit][..., 0].flatten())

    def finished(self, inputs: None) -> None:
        """Nothing is kept."""


def test_clamped_losses_are_those_of_clamped_visits(mesh):
    found = clamped_losses(Doubling(), mesh, [None, None], 3, lambda x: x, 2 * S)
    x, y = 18 / 37**0.5, 3 / 37**0.5  # (6, 1) at length 3
    assert found["rms"] == pytest.approx(3 * 2 * x / math.hypot(2 * x, 2 * y + 1), rel=1e-6)
    moved = (3 * 3 + 1 * (1 + 1)) / 10  # of (3, 1), Δ = (3, 2) along it
    assert found["radial"] == pytest.approx(3 + 3 - 3 * moved, rel=1e-6)


# ---- the model at every layout


def toy(readout: str, coda_layers: int = 0, **parallel) -> tuple[Config, Ring, list[Inputs]]:
    values = {
        "corpus": {"sequence_length": S},
        "model": {**BARE, **SIZES, "readout": readout, "coda_layers": coda_layers},
        "objective": {"kind": "per_loop"},
        "depth": {"prior": "fixed", "mean": 4, "backprop": None, "cap": 8},
        "batch": {"global_batch": 4, "microbatch": 1},
        "parallel": parallel,
    }
    config = from_values(Config, values, "toy").config
    inputs = example()
    documents = Documents.whole(1, S, torch.device("cpu"))
    each = [
        Inputs(inputs.tokens[i : i + 1], inputs.targets[i : i + 1], documents, torch.tensor([i]), 0, "evaluation", 4)
        for i in range(B)
    ]
    return config, Ring.of(config, count(config.model, S)), each


def built(config: Config, ring: Ring, mesh: Mesh):
    return TrainStep(config, settle(config.batch, 1, mesh.data_size), ring, mesh).stage


def diagnosed(mesh: Mesh, parallel: dict) -> tuple[Scale, bool]:
    """The scale of a fresh model with a coda on three sequences, and whether all gradients are None."""
    config, ring, inputs = toy("raw", 1, **parallel)
    stage = built(config, ring, mesh)
    found = diagnose(stage, ring, mesh, config, inputs[mesh.data_rank :: mesh.data_size])
    return found, all(p.grad is None for p in stage.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks_needed", "parallel"),
    [
        (2, {"tensor": 2}),
        (2, {"tensor": 2, "sequence_parallel": True}),
        (2, {"pipeline": 2}),
        (4, {}),
    ],
    ids=["TP2", "TP2 with sequence parallelism", "PP2", "DP4 of three sequences"],
)
def test_every_layout_sees_the_scale_of_one_process(mesh, ranks, ranks_needed, parallel):
    expected, _ = diagnosed(mesh, {})
    assert min(expected.sight.radial_fractions) > 1e-3
    for found, cleared in ranks.run(diagnosed, ranks_needed, parallel, parallel=ParallelConfig(**parallel)):
        assert cleared
        assert found.sight.radial_fractions == pytest.approx(expected.sight.radial_fractions, abs=1e-5)
        assert found.sight.token_correlation == pytest.approx(expected.sight.token_correlation, abs=1e-5)
        assert found.sight.scaled_losses == pytest.approx(expected.sight.scaled_losses, rel=1e-5)
        assert (found.first_loss, found.loss) == pytest.approx((expected.first_loss, expected.loss), rel=1e-5)
        assert found.norms.max == pytest.approx(expected.norms.max, rel=1e-5)
        assert found.norms.std == pytest.approx(expected.norms.std, rel=1e-4)
        assert sum(map(sum, found.norms.counts)) == 4 * B * S
        for own, there in zip(found.sight.motions[1:], expected.sight.motions[1:], strict=True):
            assert vars(own) == pytest.approx(vars(there), rel=1e-4, abs=1e-6)
        if "pipeline" in parallel:
            assert found.clamped is None
        else:
            assert found.clamped == pytest.approx(expected.clamped, rel=1e-5)


def test_a_gradient_that_is_not_a_number_has_no_radial_part_rather_than_none_at_all(mesh):
    stage, inputs = build("raw"), example()
    with torch.no_grad():
        stage.head_weight.fill_(torch.nan)
    meter = ScaleMeter(stage, mesh, [inputs], 1)
    meter.observe(0, 1, None, states(1.0))
    assert meter.result(lambda x: x, 1).radial_fractions == [None]
