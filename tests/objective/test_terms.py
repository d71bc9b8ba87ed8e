"""The terms of a per-loop objective against the formulas, in fp64, on the states that the model went through."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopscale.config.tree import ModelConfig, ObjectiveConfig
from loopscale.model.inputs import Documents, Inputs
from loopscale.objective.supervision import exits
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.plan import plan

V, S, B, D, LOOPS = 61, 12, 3, 48, 4


@pytest.mark.parametrize("readout", ["rmsnorm", "raw", "final_only"])
def test_per_loop_loss_penalty_and_anchor_are_those_of_the_formulas(mesh, readout):
    """(1/K) Σ_k CE(Wᵀ r_k(h_k)) over scored tokens; λ mean(h²); w mean over sequences of (RMS − target)²."""
    from loopscale.model.stage import LoopedStage

    objective = ObjectiveConfig(kind="per_loop", norm_penalty=0.01, anchor=0.2, anchor_target=1.5)
    model = ModelConfig(
        vocab_size=V, hidden_size=D, heads=4, ffn_size=64, prelude_layers=0, core_layers=2, coda_layers=0, inject="none",
        state_init="embedding", readout=readout, init_std=0.3,
    )  # fmt: skip
    stage = LoopedStage(model, S, seed=0, objective=objective)
    tokens = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[1, :4] = -100
    inputs = Inputs(tokens[:, :-1], targets, Documents.whole(B, S, torch.device("cpu")), torch.arange(B), final_visit=LOOPS)
    seen = {}
    scored = int((targets >= 0).sum())
    task = Task(inputs, LOOPS, LOOPS, exits(objective, LOOPS, LOOPS), 1 / scored, 1 / B)
    order = plan(1, [task.work], in_flight=1)
    terms = execute(order, stage, [task], Links.alone(), observe=lambda m, r, before, h: seen.update({r: h.double()}))[0].terms

    weight = stage.head_weight[:V].detach().double()
    losses = []
    for r, h in seen.items():
        is_normed = readout == "rmsnorm" or (readout == "final_only" and r == LOOPS)
        decoded = h / (h.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() if is_normed else h  # gains are 1 at first
        losses.append(F.cross_entropy((decoded @ weight.t()).transpose(0, 1).flatten(0, 1), targets.flatten()))
    squares = torch.stack(list(seen.values())).square().mean((0, 1, 3))
    assert terms["cross_entropy"].item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    assert terms["norm_penalty"].item() == pytest.approx(0.01 * squares.mean().item(), rel=1e-6)
    assert terms["anchor"].item() == pytest.approx(0.2 * (squares.sqrt() - 1.5).square().mean().item(), rel=1e-6)
