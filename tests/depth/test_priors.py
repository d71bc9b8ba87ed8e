"""PLN against the published figures, and draws that depend on nothing but (seed, step, group)."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscale.config.tree import DepthConfig
from loopscale.depth import Prior, draw_depths, make_prior, pln

PUBLISHED = (0.0577, 0.1271, 0.1634, 0.1619, 0.1380, 0.1070, 0.0780, 0.0547, 0.0374, 0.0251)


def test_pln_5_has_the_published_probabilities():
    prior = pln(5.0)
    assert prior.probabilities[:10] == pytest.approx(PUBLISHED, abs=1e-4)
    assert prior.mean == pytest.approx(5.0, abs=1e-3)
    assert math.fsum(prior.probabilities) == pytest.approx(1.0, abs=1e-12)
    assert prior.entropy == pytest.approx(2.348, abs=1e-3)
    variance = math.fsum(p * (r - prior.mean) ** 2 for r, p in enumerate(prior.probabilities, 1))
    assert variance == pytest.approx(8.54, abs=0.01)
    assert math.fsum(prior.probabilities[10:]) == pytest.approx(0.0497, abs=1e-4)
    assert len(prior.probabilities) == 64


@settings(deadline=None, max_examples=20)
@given(mean=st.floats(1.05, 12), cap=st.integers(16, 64))
def test_the_capped_mean_is_the_one_asked_for(mean, cap):
    assert pln(mean, 0.5, cap).mean == pytest.approx(mean, abs=1e-6)


def test_draws_follow_the_law():
    prior, n = pln(5.0), 40_000
    counts = Counter(draw_depths(prior, 3, step, 1)[0] for step in range(n))
    assert sum(r * c for r, c in counts.items()) / n == pytest.approx(5.0, abs=4 * math.sqrt(8.54 / n))
    for r in range(1, 11):
        p = prior.probabilities[r - 1]
        assert counts[r] / n == pytest.approx(p, abs=4 * math.sqrt(p / n))


def test_a_draw_depends_on_seed_step_and_group_alone():
    prior = pln(5.0)
    assert draw_depths(prior, 1, 10, 4)[:2] == draw_depths(prior, 1, 10, 2)
    assert draw_depths(prior, 1, 10, 16) != draw_depths(prior, 2, 10, 16)
    assert draw_depths(prior, 1, 10, 16) != draw_depths(prior, 1, 11, 16)


def test_a_fixed_depth_is_always_drawn():
    prior = make_prior(DepthConfig(prior="fixed", mean=4))
    assert {d for step in range(50) for d in draw_depths(prior, 1, step, 3)} == {4}
    assert (prior.mean, prior.entropy) == (4.0, 0.0)


@given(u=st.floats(0, 1, exclude_max=True))
def test_a_quantile_has_positive_probability(u):
    prior = Prior("table", (0.25, 0.0, 0.5, 0.25, 0.0))
    assert prior.quantile(u) == (1 if u < 0.25 else 3 if u < 0.75 else 4)
