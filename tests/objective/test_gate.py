"""The exit gate against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from loopscale.objective import gate, scale


def test_probabilities_sum_to_one_and_the_last_takes_what_is_left():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    p = gate.exit_log_probabilities(logits).exp()
    torch.testing.assert_close(p.sum(0), torch.ones(40, dtype=torch.float64))
    leave = torch.sigmoid(logits)
    torch.testing.assert_close(p[2], leave[2] * (1 - leave[0]) * (1 - leave[1]))
    torch.testing.assert_close(p[4], (1 - leave[:4]).prod(0))


def test_much_entropy_weight_gives_the_uniform_distribution():
    """β → ∞: the minimum of Σ p L − β H(p) is p = 1/T."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    losses = torch.tensor([[3.0], [2.0], [1.0], [0.5]])
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        log_p = gate.exit_log_probabilities(logits)
        ((log_p.exp() * losses).sum(0) - 1e4 * gate.entropy(log_p)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(gate.exit_log_probabilities(logits).exp(), torch.full((4, 3), 0.25), atol=2e-3, rtol=0)
    assert gate.entropy(torch.full((4, 1), math.log(0.25))).item() == pytest.approx(math.log(4))


def test_stage_two_by_hand():
    """Losses 3.0, 2.9, 2.9, 3.0: gains 0.1, 0, 0 -> targets sigmoid(4.75), sigmoid(-0.25) twice."""
    losses = torch.tensor([[3.0], [2.9], [2.9], [3.0]], dtype=torch.float64)
    logits = torch.tensor([[5.0], [0.5], [-1.0], [2.0]], dtype=torch.float64)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = 0.0
    for logit, target in ((0.5, sigmoid(4.75)), (-1.0, sigmoid(-0.25)), (2.0, sigmoid(-0.25))):
        stay = 1 - sigmoid(logit)
        expected -= target * math.log(stay) + (1 - target) * math.log(1 - stay)
    assert gate.continue_loss(logits, losses).item() == pytest.approx(expected / 4, rel=1e-9)


def test_gradcheck():
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    losses = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.autograd.gradcheck(lambda x: gate.entropy(gate.exit_log_probabilities(x)), (logits,))
    assert torch.autograd.gradcheck(lambda x: gate.continue_loss(x, losses), (logits,))
    states = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    active = torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h: scale.mean_squares(h, active, 3), (states,))
    assert torch.autograd.gradcheck(lambda h: scale.anchor(scale.mean_squares(h, active, 3), 1.0), (states,))


def test_penalty_is_the_mean_square():
    states = torch.randn(3, 7, 2, 5, generator=torch.Generator().manual_seed(5))
    squares = scale.mean_squares(states, torch.ones(3, 2), 7)
    assert squares.mean().item() == pytest.approx(states.square().mean().item(), rel=1e-6)
    late = scale.mean_squares(states, torch.tensor([[0.0, 1], [1, 1], [1, 1]]), 7)
    assert late[0].item() == pytest.approx(states[1:, :, 0].square().mean().item(), rel=1e-6)
    parts = [scale.mean_squares(states[:, own], torch.ones(3, 2), 7) for own in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(parts[0] + parts[1], squares)
    assert scale.anchor(squares, 1.0)[1].item() == pytest.approx(
        (states[:, :, 1].square().mean().sqrt().item() - 1) ** 2, rel=1e-5
    )
