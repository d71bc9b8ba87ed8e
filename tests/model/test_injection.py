"""Injections and readouts by what they promise, and their gradients in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscale.config.registry import INJECTIONS, READOUTS, find
from loopscale.config.tree import ModelConfig
from loopscale.model.between import BETWEEN
from loopscale.model.injection import OrthoInjection, _Ortho, make_injection
from loopscale.model.norm import HeadNorm, RMSNorm
from loopscale.model.readout import make_readout

D = 6


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ortho(epsilon: float) -> OrthoInjection:
    injection = filled(OrthoInjection(ModelConfig(hidden_size=D)))
    injection.EPSILON = epsilon
    return injection


def test_ortho_output_along_q_is_q_itself():
    """⟨out, q⟩ = ‖q‖² at ε = 0, and ‖q‖² + ⟨v, q⟩ ε / (‖q‖² + ε) above it."""
    h, e = noise(40, 3), noise(40, 3, seed=2)
    for epsilon in (0.0, 1e-6, 0.5):
        injection = ortho(epsilon)
        q, v = injection.source(e), injection.decay() * h
        along, square = (injection(h, q) * q).sum(-1), q.square().sum(-1)
        deviation = (v * q).sum(-1) * epsilon / (square + epsilon)
        torch.testing.assert_close(along, square + deviation, rtol=1e-6, atol=1e-12)
    single = OrthoInjection(ModelConfig(hidden_size=D))
    filled(single).float()
    single.EPSILON = 0.0
    q = single.source(e.float())
    torch.testing.assert_close((single(h.float(), q) * q).sum(-1), q.square().sum(-1), rtol=1e-5, atol=1e-6)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), state=st.floats(1e-3, 1e6), source=st.floats(1e-6, 1e6))
def test_what_ortho_carries_never_grows(seed, state, source):
    """‖P v‖ ≤ ‖v‖ ≤ ‖h‖: the projector and the decay only take away."""
    injection = ortho(1e-6)
    h, q = state * noise(5, seed=seed), source * noise(5, seed=seed + 1)
    v, carried = injection.decay() * h, injection(h, q) - q
    assert (v.norm(dim=-1) <= h.norm(dim=-1) * (1 + 1e-12)).all()
    assert (carried.norm(dim=-1) <= v.norm(dim=-1) * (1 + 1e-9) + 1e-9 * q.norm(dim=-1)).all()


@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_orthos_own_backward_is_the_derivative_of_its_formula(epsilon):
    """By finite differences, and against autograd through the formula of the docstring, in fp64."""
    source = torch.Generator().manual_seed(3)
    h, q = (torch.randn(3, 2, 5, dtype=torch.float64, generator=source, requires_grad=True) for _ in range(2))
    a = torch.rand(5, dtype=torch.float64, generator=source, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h, a, q: _Ortho.apply(h, a, q, epsilon), (h, a, q))
    v, upstream = a * h, torch.randn(3, 2, 5, dtype=torch.float64, generator=source)
    plain = v - ((v * q).sum(-1) / ((q * q).sum(-1) + epsilon)).unsqueeze(-1) * q + q
    ours = _Ortho.apply(h, a, q, epsilon)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-14)
    for found, expected in zip(
        torch.autograd.grad(ours, (h, a, q), upstream), torch.autograd.grad(plain, (h, a, q), upstream), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_ortho_without_an_input_only_decays_and_its_gradients_are_finite():
    injection, h = ortho(1e-6), noise(4).requires_grad_()
    e = torch.zeros(4, D, dtype=torch.float64, requires_grad=True)
    out = injection(h, injection.source(e))
    torch.testing.assert_close(out, injection.decay() * h)
    out.sum().backward()
    assert torch.isfinite(h.grad).all()
    assert torch.isfinite(e.grad).all()


@pytest.mark.parametrize("name", [name for name in INJECTIONS if name != "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck_of_every_injection(name, bias):
    injection = filled(make_injection(ModelConfig(hidden_size=D, inject=name, inject_bias=bias)))

    def both_halves(h, e, *values):
        named = dict(zip([n for n, _ in injection.named_parameters()], values, strict=True))
        return torch.func.functional_call(_Whole(injection), {f"injection.{n}": v for n, v in named.items()}, (h, e))

    inputs = (noise(3).requires_grad_(), noise(3, seed=2).requires_grad_(), *injection.parameters())
    assert torch.autograd.gradcheck(both_halves, inputs)


class _Whole(torch.nn.Module):
    def __init__(self, injection):
        super().__init__()
        self.injection = injection

    def forward(self, h, e):
        return self.injection(h, self.injection.source(e))


@pytest.mark.parametrize("name", READOUTS)
@pytest.mark.parametrize("final", [False, True])
def test_gradcheck_of_every_readout(name, final):
    readout = filled(make_readout(ModelConfig(hidden_size=D, readout=name)))
    assert torch.autograd.gradcheck(lambda h: readout(h, final), (noise(3).requires_grad_(),))


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_takes_scale_away(name):
    between = BETWEEN[name](ModelConfig(hidden_size=D))
    with torch.no_grad():
        for parameter in between.parameters():
            parameter.fill_(2.0 if name == "damping" else 0.0)
    h = noise(5).float()
    if name in ("rmsnorm", "unit"):
        torch.testing.assert_close(between(1e4 * h), between(h), rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(between(h), h * 0.8807970779778823)  # sigmoid(2)


def test_rms_norm_equals_that_of_torch_with_its_gradients():
    norm = filled(RMSNorm(None, D, 1e-6)).float()
    x = noise(7, 3).float().requires_grad_()
    y = x.detach().clone().requires_grad_()
    gain = (1 + norm.weight.detach()).requires_grad_()
    weight = noise(7, 3, seed=4).float()
    (norm(x) * weight).sum().backward()
    (torch.nn.functional.rms_norm(y, (D,), gain, 1e-6) * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad, gain.grad, rtol=1e-5, atol=1e-5)
    unit = HeadNorm(None, D, 1e-6)(x.detach())
    torch.testing.assert_close(unit.square().mean(-1), torch.ones(7, 3), rtol=1e-4, atol=1e-4)


def test_readouts_see_what_they_say():
    """Scaling the state: rmsnorm hides it, raw shows it, alpha shows its power, final_only hides it at the end alone."""
    h = noise(5)
    for name, final, power in (
        ("rmsnorm", False, 0),
        ("raw", True, 1),
        ("alpha", True, 0.5),
        ("final_only", True, 0),
        ("final_only", False, 1),
    ):
        readout = find(READOUTS[name])(ModelConfig(hidden_size=D, readout=name)).double()
        with torch.no_grad():
            for parameter in readout.parameters():
                parameter.zero_()  # gain 1; α = sigmoid(0) = ½; s_ref = 1
        torch.testing.assert_close(
            readout(100 * h, final).double(), 100**power * readout(h, final).double(), rtol=1e-4, atol=1e-5
        )
