"""The loop's equilibrium: contraction against exact Jacobians, truncated gradients against plain autograd, on toys."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from loopscale.config import Config, from_values, settle
from loopscale.config.tree import ModelConfig, ParallelConfig
from loopscale.diagnostics.equilibrium import contraction, truncation_errors
from loopscale.evaluate.equilibrium import Equilibrium, diagnose
from loopscale.model.flops import count
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.ring import Ring
from loopscale.objective.supervision import Exit
from loopscale.parallel.mesh import Mesh
from loopscale.parallel.ring.execute import ExitLoss, Feed
from loopscale.parallel.ring.plan import plan
from loopscale.train.step import TrainStep

S, B, D = 3, 2, 4


class Linear(nn.Module):
    """h → A h + e per token, e = w x, and an exit that scores ⟨u, h⟩ + ‖h‖² / 2 of every token."""

    compute = torch.bfloat16

    def __init__(self, matrix: Tensor):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x, self.start, self.u = (torch.randn(S, B, len(matrix), generator=generator) for _ in range(3))
        self.matrix, self.w = nn.Parameter(matrix.clone()), nn.Parameter(torch.ones(len(matrix)))
        self.quadratic, self.seen = 1.0, set()

    def state_shape(self, inputs: None) -> tuple[int, ...]:
        return tuple(self.x.shape)

    def prelude(self, inputs: None) -> Feed:
        return (self.w * self.x,)

    def visit(self, inputs: None, feed: Feed, state: Tensor | None, visit: int) -> Tensor:
        self.seen.add(self.compute)
        return (self.start if state is None else state) @ self.matrix.t() + feed[0]

    def exit(self, inputs: None, exit: Exit, states) -> ExitLoss:
        h = states[exit.visit]
        score = (self.u * h).sum() + self.quadratic * h.square().sum() / 2
        return ExitLoss({"cross_entropy": score}, {}, torch.zeros(S * B))

    def finished(self, inputs: None) -> None:
        """Nothing is kept."""


def with_eigenvalues(*blocks: list[list[float]]) -> Tensor:
    """A matrix of these diagonal blocks in a basis that is far from orthogonal."""
    basis = torch.eye(D) + 0.5 * torch.randn(D, D, generator=torch.Generator().manual_seed(1))
    return basis @ torch.block_diag(*map(torch.tensor, blocks)) @ basis.inverse()


def turn(radius: float, angle: float) -> list[list[float]]:
    """Its eigenvalues are radius · exp(±i angle)."""
    c, s = radius * math.cos(angle), radius * math.sin(angle)
    return [[c, -s], [s, c]]


@pytest.mark.parametrize(
    ("blocks", "radius"),
    [
        ([[[0.9]], [[0.5]], [[-0.3]], [[0.1]]], 0.9),
        ([[[-0.8]], [[0.5]], [[0.3]], [[0.1]]], 0.8),
        ([turn(0.85, 1.0), [[0.6]], [[0.1]]], 0.85),
        ([turn(1.1, 0.3), turn(0.7, 2.0)], 1.1),
    ],
    ids=["real", "negative", "complex pair", "expanding pair"],
)
def test_contraction_of_a_linear_visit_is_the_largest_eigenvalue(mesh, blocks, radius):
    stage = Linear(with_eigenvalues(*blocks))
    assert contraction(stage, mesh, [None], visits=20, iterations=200) == pytest.approx(radius, rel=1e-2)
    assert contraction(stage, mesh, [None], visits=20, iterations=32) == pytest.approx(radius, rel=8e-2)
    assert stage.seen == {torch.float32}
    assert stage.compute == torch.bfloat16


class Coupled(Linear):
    """h_t → tanh(A h_t + C · mean of h_1 … h_t) + e_t: tokens are coupled causally, as by attention."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        super().__init__(0.45 * torch.randn(D, D, generator=generator))
        self.mix = 0.45 * torch.randn(D, D, generator=generator)

    def visit(self, inputs: None, feed: Feed, state: Tensor | None, visit: int) -> Tensor:
        h = self.start if state is None else state
        mean = h.cumsum(0) / torch.arange(1, S + 1)[:, None, None]
        return torch.tanh(h @ self.matrix.t() + mean @ self.mix.t()) + feed[0]


def exact_radii(stage, inputs, visits: int) -> list[float]:
    """Spectral radius of the exact Jacobian for each sequence, all of its tokens together."""
    with torch.no_grad():
        feed, state = stage.prelude(inputs), None
        for visit in range(1, visits + 1):
            state = stage.visit(inputs, feed, state, visit)
    jacobian = torch.autograd.functional.jacobian(lambda h: stage.visit(inputs, feed, h, visits + 1), state).double()
    size = state.shape[0] * state.shape[2]
    own = [jacobian[:, b, :, :, b].reshape(size, size) for b in range(state.shape[1])]
    return [torch.linalg.eigvals(j).abs().max().item() for j in own]


def test_contraction_of_coupled_tokens_is_that_of_the_exact_jacobian(mesh):
    stage = Coupled()
    radii = exact_radii(stage, None, 40)
    assert abs(radii[0] - radii[1]) > 0.02  # each sequence has its own
    assert contraction(stage, mesh, [None], visits=40, iterations=400) == pytest.approx(sum(radii) / B, rel=1e-2)


def test_contraction_of_the_model_is_that_of_the_exact_jacobian(mesh):
    from loopscale.model.stage import LoopedStage

    model = ModelConfig(vocab_size=31, hidden_size=16, heads=2, ffn_size=24, core_layers=1, init_std=0.2, inject="ortho")
    stage = LoopedStage(model, 6, seed=3)
    tokens = torch.randint(31, (B, 7), generator=torch.Generator().manual_seed(0))
    documents = Documents.whole(B, 6, torch.device("cpu"))
    inputs = Inputs(tokens[:, :-1], tokens[:, 1:].contiguous(), documents, torch.arange(B), purpose="evaluation")
    expected = sum(exact_radii(stage, inputs, 20)) / B
    assert 0.2 < expected < 1.2
    assert contraction(stage, mesh, [inputs], visits=20, iterations=400) == pytest.approx(expected, rel=1e-2)


def errors(stage, mesh: Mesh, depth: int, visits: list[int], trained: list[nn.Parameter]) -> dict:
    return truncation_errors(
        stage,
        partial(plan, 1, in_flight=1),
        mesh,
        [None, None],
        [(p, False) for p in trained],
        depth=depth,
        gradient_visits=visits,
    )


def by_autograd(stage: Linear, depth: int, b: int) -> Tensor:
    feed, h = stage.prelude(None), stage.start
    for visit in range(1, depth + 1):
        h = stage.visit(None, feed if visit > depth - b else (feed[0].detach(),), h, visit)
        if visit == depth - b:
            h = h.detach()
    loss = stage.exit(None, Exit(depth, (depth,)), {depth: h}).tokens["cross_entropy"]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(stage.parameters()))]).double()


def test_truncation_is_that_of_autograd_with_a_detached_state(mesh):
    stage, depth = Coupled(), 6
    found = errors(stage, mesh, depth, [1, 2, 4, 6], list(stage.parameters()))
    full = by_autograd(stage, depth, depth)
    for b in (1, 2, 4):
        own = by_autograd(stage, depth, b)
        assert found[b].error == pytest.approx(((own - full).norm() / full.norm()).item(), rel=1e-4)
        assert found[b].cosine == pytest.approx(torch.cosine_similarity(own, full, dim=0).item(), abs=1e-5)
    assert (found[6].error, found[6].cosine) == (0, pytest.approx(1))
    assert all(p.grad is None for p in stage.parameters())


def test_truncation_of_a_linear_visit_decays_as_its_contraction(mesh):
    """Under h → κ h + e and a linear score the gradient of e is Σ_{i<b} κ^i of that of the last visit."""
    stage, kappa, depth = Linear(0.6 * torch.eye(D)), 0.6, 8
    stage.quadratic = 0.0
    found = errors(stage, mesh, depth, [1, 2, 3, 4], [stage.w])
    expected = {b: (kappa**b - kappa**depth) / (1 - kappa**depth) for b in (1, 2, 3, 4)}
    assert {b: e.error for b, e in found.items()} == pytest.approx(expected, rel=1e-4)
    assert [e.cosine for e in found.values()] == pytest.approx([1] * 4)
    assert [later / before for before, later in pairwise(expected.values())] == pytest.approx([kappa] * 3, rel=0.1)


# ---- layouts

TOY = {
    "corpus": {"sequence_length": 16},
    "model": {
        "vocab_size": 101, "hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_size": 48, "core_layers": 2, "init_std": 0.1,
    },
    "depth": {"mean": 4, "backprop": 3, "cap": 8},
    "batch": {"global_batch": 4, "microbatch": 1},
}  # fmt: skip
SEQUENCES = 3


def configured(**parallel) -> Config:
    return from_values(Config, {**TOY, "parallel": parallel}, "toy").config


def diagnosed(mesh: Mesh, config: Config) -> tuple[Equilibrium, bool]:
    """The equilibrium of a fresh model on three sequences, and whether all gradients are None."""
    batch = settle(config.batch, 1, mesh.data_size)
    ring = Ring.of(config, count(config.model, 16))
    train = TrainStep(config, batch, ring, mesh)
    tokens = torch.randint(101, (SEQUENCES, 17), generator=torch.Generator().manual_seed(0))
    own = range(mesh.data_rank, SEQUENCES, mesh.data_size)
    documents = Documents.whole(1, 16, torch.device("cpu"))
    inputs = [
        Inputs(tokens[i : i + 1, :-1], tokens[i : i + 1, 1:].contiguous(), documents, torch.tensor([i]), purpose="evaluation")
        for i in own
    ]
    found = diagnose(train.stage, ring, mesh, config, inputs)
    return found, all(p.grad is None for p in train.stage.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks_needed", "parallel"),
    [
        (2, {"tensor": 2}),
        (2, {"tensor": 2, "sequence_parallel": True}),
        (2, {"pipeline": 2}),
        (2, {}),
        (4, {}),
    ],
    ids=["TP2", "TP2 with sequence parallelism", "PP2", "DP2", "DP4 of three sequences"],
)
def test_every_layout_finds_the_equilibrium_of_one_process(mesh, ranks, ranks_needed, parallel):
    expected, _ = diagnosed(mesh, configured())
    assert set(expected.truncation) == {1, 2, 3}
    assert len(expected.converged) == 8
    if "pipeline" in parallel:
        expected = replace(expected, contraction=None)
    for found, cleared in ranks.run(diagnosed, ranks_needed, configured(**parallel), parallel=ParallelConfig(**parallel)):
        assert cleared
        assert found.contraction == (None if expected.contraction is None else pytest.approx(expected.contraction, rel=1e-4))
        for b, error in expected.truncation.items():
            assert found.truncation[b].error == pytest.approx(error.error, rel=1e-4)
            assert found.truncation[b].cosine == pytest.approx(error.cosine, rel=1e-4)
        assert found.change[1:] == pytest.approx(expected.change[1:], rel=1e-4)
        assert found.converged[1:] == pytest.approx(expected.converged[1:], abs=1 / (16 * SEQUENCES))
