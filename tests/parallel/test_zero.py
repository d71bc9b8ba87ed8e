"""AdamW over DeepSpeed ZeRO against torch's own, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from loopscale.config.tree import OptimizerConfig

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, no_decay=("norm",), clip=1.0)
KINDS = {"matrix": "matrix", "gain": "norm", "other": "embedding"}
TOLERANCE = 1e-5
SHAPES = {"matrix": (33, 7), "gain": (7,), "other": (5, 4)}


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(ranks)]


def moved(zero, ours, build):
    """Weights and moments in parameters and an optimizer of their own."""
    new = parameters()
    other = build(new)
    for name, parameter in new.items():
        parameter.data.copy_(ours[name].data)
    kept = {(moment, name): here.clone() for moment, name, _, here in zero.moments()}
    for moment, name, _, here in other.moments():
        here.copy_(kept[moment, name])
    other.begin_at(zero.applied_steps)
    return new, other


def compare(mesh, zero_stage: int, reload_at: int | None = None, offload: bool = False) -> float:
    """Eight steps of changing rate; the averaged gradients are clipped; optionally a new optimizer takes over midway.

    Returns the largest difference of any weight after the last step.
    """
    from loopscale.parallel.zero import ZeroOptimizer

    ours, plain = parameters(), parameters()
    zero = ZeroOptimizer(ours, KINDS, CONFIG, zero_stage, offload=offload)
    groups = [
        {"params": [plain["matrix"], plain["other"]], "weight_decay": 0.1},
        {"params": [plain["gain"]], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps)
    for step in range(8):
        lr = 1e-2 * (1 + step % 3)
        drawn = gradients(step, mesh.data_size)
        for name, parameter in ours.items():
            parameter.grad = drawn[mesh.data_rank][name].clone()
            plain[name].grad = torch.stack([d[name] for d in drawn]).mean(0)
        for group in adam.param_groups:
            group["lr"] = lr
        expected = torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        adam.step()
        assert zero.step(lr / CONFIG.lr) == pytest.approx(expected.item(), rel=1e-5)
        for name in ours:
            torch.testing.assert_close(ours[name].data, plain[name].data, rtol=1e-5, atol=1e-6)
            assert ours[name].grad is None
        for moment, name, first, here in zero.moments():
            expected_here = adam.state[plain[name]][moment].flatten()[first : first + len(here)]
            torch.testing.assert_close(here, expected_here, msg=f"{moment} of {name}")
        if step == reload_at:
            ours, zero = moved(zero, ours, lambda own: ZeroOptimizer(own, KINDS, CONFIG, zero_stage, offload=offload))
    return max(float((ours[name] - plain[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("reload_at", [None, 3])
def test_one_rank(mesh, zero_stage, reload_at):
    assert compare(mesh, zero_stage, reload_at) <= TOLERANCE


@pytest.mark.parametrize("reload_at", [None, 3])
def test_one_rank_with_its_state_offloaded(mesh, reload_at):
    assert compare(mesh, 1, reload_at, offload=True) <= TOLERANCE


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_two_ranks(ranks, zero_stage):
    assert max(ranks.run(compare, 2, zero_stage, reload_at=3)) <= TOLERANCE


def state_bytes(mesh, offload: bool) -> int:
    """Bytes of this rank's part of the optimizer's state after a step of some 10^5 weights."""
    from loopscale.parallel.zero import ZeroOptimizer

    weights = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("matrix", (321, 311)), ("gain", (311,)))}
    zero = ZeroOptimizer(weights, KINDS, CONFIG, 1, offload=offload)
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    zero.step(1.0)
    return sum(t.nbytes for t in zero.state_tensors())


@pytest.mark.ranks
@pytest.mark.parametrize("offload", [False, True])
def test_optimizer_state_falls_as_one_over_replicas(mesh, ranks, offload):
    """Master part and two moments, 12 bytes a weight, on one rank and on 2 and 4."""
    whole = 12 * (321 * 311 + 311)
    assert state_bytes(mesh, offload) == pytest.approx(whole, rel=0.02)
    for size in (2, 4):
        assert ranks.run(state_bytes, size, offload) == pytest.approx([whole / size] * size, rel=0.02)


def test_muon_steps_matrices_and_adamw_the_rest(mesh):
    """Six steps beside torch's own two optimizers, with a reload in the middle."""
    from loopscale.parallel.zero import ZeroOptimizer

    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.0, muon_lr=2e-2, muon_decay=0.1, muon_momentum=0.9, clip=None)
    ours, plain = parameters(), parameters()
    zero = ZeroOptimizer(ours, KINDS, config, 0)
    muon = torch.optim.Muon([plain["matrix"]], lr=2e-2, weight_decay=0.1, momentum=0.9)
    adam = torch.optim.AdamW([plain["gain"], plain["other"]], lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.0)
    for step in range(6):
        rate = 1 / (1 + step)
        drawn = gradients(step, 1)[0]
        for name in ours:
            ours[name].grad, plain[name].grad = drawn[name].clone(), drawn[name].clone()
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 2e-2 * rate, 1e-2 * rate
        muon.step()
        adam.step()
        zero.step(rate)
        for name in ours:
            torch.testing.assert_close(ours[name].data, plain[name].data, rtol=1e-5, atol=1e-6)
        if step == 2:
            assert {moment for moment, *_ in zero.moments()} == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
            ours, zero = moved(zero, ours, lambda own: ZeroOptimizer(own, KINDS, config, 0))


def test_moments_before_the_first_step_are_zeros(mesh):
    from loopscale.parallel.zero import ZeroOptimizer

    moments = list(ZeroOptimizer(parameters(), KINDS, CONFIG, 1).moments())
    assert sorted((moment, name) for moment, name, *_ in moments) == [
        (m, n) for m in ("exp_avg", "exp_avg_sq") for n in sorted(SHAPES)
    ]
    assert all(not here.any() for *_, here in moments)
