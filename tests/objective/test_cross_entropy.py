"""Chunked cross entropy against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopscale.objective.cross_entropy import linear_cross_entropy


def example(n=37, d=16, v=50):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(n, d, generator=generator).requires_grad_()
    weight = torch.randn(v, d, generator=generator).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    targets[3] = targets[30] = -100
    return states, weight, targets


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_value_and_gradients_equal_those_of_whole_logits(chunk):
    states, weight, targets = example()
    total, losses = linear_cross_entropy(states, weight, targets, chunk)
    (total * 0.25).backward()
    wide, wide_weight = states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.cross_entropy(wide @ wide_weight.t(), targets, ignore_index=-100, reduction="none")
    (expected.sum() * 0.25).backward()
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=1e-5, atol=1e-5)
    assert total.item() == pytest.approx(expected.sum().item(), rel=1e-6)


def test_never_more_than_a_chunk_of_logits_exists():
    states, weight, targets = example(n=512, v=2048)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    with Largest() as largest:
        linear_cross_entropy(states, weight, targets, 16)[0].backward()
    assert largest.elements == max(weight.numel(), 16 * 2048)


def test_huge_logits_stay_finite():
    states, weight, targets = example()
    total, _ = linear_cross_entropy(states * 1e4, weight, targets, 8)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(weight.grad).all()


def test_bf16_states_give_an_fp32_weight_gradient():
    states, weight, targets = example()
    total, _ = linear_cross_entropy(states.detach().bfloat16(), weight, targets, 8)
    total.backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("chunk", [8, 1000])
def test_row_weights_scale_each_loss_and_learn_from_it(chunk):
    states, weight, targets = example()
    rows = torch.rand(37, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total, losses = linear_cross_entropy(states, weight, targets, chunk, rows)
    total.backward()
    wide, wide_weight = states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wide_rows = rows.detach().double().requires_grad_()
    expected = F.cross_entropy(wide @ wide_weight.t(), targets, ignore_index=-100, reduction="none")
    (expected * wide_rows).sum().backward()
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for found, wanted in ((states, wide), (weight, wide_weight), (rows, wide_rows)):
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)
