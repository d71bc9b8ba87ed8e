"""Norms by loop against plain statistics of all tokens."""

from __future__ import annotations

import pytest
import torch

from loopscale.diagnostics.norms import NormMeter


def test_mean_percentile_and_change_are_those_of_all_tokens():
    generator = torch.Generator().manual_seed(0)
    meter = NormMeter(4, torch.device("cpu"))
    h = [torch.randn(16, 8, 32, generator=generator) * scale for scale in (1.0, 3.0)]
    for part in range(2):  # two microbatches
        one, two = (x[:, 4 * part : 4 * part + 4] for x in h)
        meter.observe(part, 1, None, one)
        meter.observe(part, 2, one, two)
    result = meter.result(lambda x: x)
    norms = [x.norm(dim=-1).flatten() for x in h]
    assert result.mean == pytest.approx([n.mean().item() for n in norms], rel=1e-5)
    assert result.p99 == pytest.approx([n.quantile(0.99).item() for n in norms], rel=0.04)
    assert result.change[0] is None
    assert result.change[1] == pytest.approx(((h[1] - h[0]).norm(dim=-1) / h[1].norm(dim=-1)).mean().item(), rel=1e-5)
    assert result.converged == [None, 0.0]
    assert len(result.mean) == 2


def test_the_spread_is_that_of_all_tokens():
    norms = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).mul(0.7).exp()  # heavy tails
    meter = NormMeter(3, torch.device("cpu"))
    for part in range(2):  # two microbatches
        for visit in (1, 2):
            meter.observe(part, visit, None, norms[visit - 1, :, 16 * part : 16 * part + 16, None])
    found = meter.spread(lambda x: x, lambda x: x)
    own = norms.flatten(1)
    assert found.mean == pytest.approx(own.mean(1).tolist(), rel=1e-5)
    assert found.std == pytest.approx(own.std(1, correction=0).tolist(), rel=1e-5)
    assert found.max == pytest.approx(own.amax(1).tolist())
    assert found.median == pytest.approx(own.median(1).values.tolist(), rel=0.02)
    assert found.p99 == pytest.approx(own.quantile(0.99, dim=1).tolist(), rel=0.04)
    assert len(found.edges) == len(found.counts[0]) + 1 == len(found.counts[1]) + 1
    for counts, each in zip(found.counts, own, strict=True):
        assert counts == torch.histogram(each, torch.tensor(found.edges)).hist.long().tolist()


def test_a_quantile_is_no_larger_than_the_largest_norm():
    meter = NormMeter(1, torch.device("cpu"))
    meter.observe(0, 1, None, torch.full((4, 1, 1), 32.0))  # the lower end of a bin
    found = meter.spread(lambda x: x, lambda x: x)
    assert found.median == found.p99 == found.max == [32.0]


def test_tokens_that_change_by_less_than_three_percent_have_converged():
    before = torch.ones(5, 2, 4)
    after = before.clone()
    after[:, 0] *= torch.tensor([1.0, 1.01, 1.029, 1.035, 0.9])[:, None]
    after[:, 1] *= 2.0
    meter = NormMeter(2, torch.device("cpu"))
    meter.observe(0, 1, None, before)
    meter.observe(0, 2, before, after)
    result = meter.result(lambda x: x)
    assert result.converged == [None, 0.3]
    assert result.change[1] == pytest.approx((0.01 / 1.01 + 0.029 / 1.029 + 0.035 / 1.035 + 0.1 / 0.9 + 5 * 0.5) / 10, rel=1e-5)


def test_tokens_that_are_not_finite_are_left_out():
    h = torch.ones(3, 2, 4)
    h[0, 0, 1], h[2, 1, 0] = float("nan"), float("inf")
    meter = NormMeter(2, torch.device("cpu"))
    meter.observe(0, 1, None, h)
    meter.observe(0, 2, h, torch.full_like(h, float("nan")))
    result = meter.result(lambda x: x)
    assert result.mean == pytest.approx([2.0])
    assert result.p99 == pytest.approx([2.0], rel=0.03)


def test_a_meter_that_saw_nothing_says_nothing():
    meter = NormMeter(3, torch.device("cpu"))
    assert meter.result(lambda x: x).mean == []
    assert meter.spread(lambda x: x, lambda x: x).max == []
