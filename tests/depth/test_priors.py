"""Laws against published figures, closed forms and plain sampling; draws depend on nothing but (seed, step, group)."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscale.config.tree import DepthConfig
from loopscale.depth import Prior, draw_depths, make_prior, pln
from loopscale.depth.draw import keyed_uniforms
from loopscale.depth.priors import DepthLaw, lognormal_poisson, mean_at

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


@pytest.mark.parametrize("scheme", ["independent", "antithetic", "stratified"])
def test_every_groups_own_law_is_the_same_under_every_scheme(scheme):
    prior, n = pln(5.0), 10_000
    for group in range(3):
        counts = Counter(draw_depths(prior, 3, step, 3, scheme)[group] for step in range(n))
        for r in range(1, 11):
            p = prior.probabilities[r - 1]
            assert counts[r] / n == pytest.approx(p, abs=4 * math.sqrt(p / n))


@given(seed=st.integers(0, 99), step=st.integers(0, 9999), groups=st.integers(1, 33))
def test_antithetic_draws_mirror_each_other_and_stratified_ones_take_a_stratum_each(seed, step, groups):
    mirrored = keyed_uniforms(seed, step, groups, "antithetic")
    assert all(a + b == pytest.approx(1, abs=1e-15) for a, b in zip(mirrored[::2], mirrored[1::2], strict=False))
    assert mirrored[::2] == keyed_uniforms(seed, step, groups, "independent")[::2]
    strata = keyed_uniforms(seed, step, groups, "stratified")
    assert sorted(int(u * groups) for u in strata) == list(range(groups))


def test_stratified_draws_make_the_work_of_steps_more_even():
    prior = pln(5.0)
    spread = {
        scheme: statistics.variance([sum(draw_depths(prior, 1, step, 16, scheme)) / 16 for step in range(2000)])
        for scheme in ("independent", "antithetic", "stratified")
    }
    assert spread["independent"] == pytest.approx(8.54 / 16, rel=0.1)
    assert spread["antithetic"] < 0.5 * spread["independent"] and spread["stratified"] < 0.1 * spread["independent"]


def test_a_fixed_depth_is_always_drawn():
    prior = make_prior(DepthConfig(prior="fixed", mean=4))
    assert {d for step in range(50) for d in draw_depths(prior, 1, step, 3)} == {4}
    assert (prior.mean, prior.entropy) == (4.0, 0.0)


@given(u=st.floats(0, 1, exclude_max=True))
def test_a_quantile_has_positive_probability(u):
    prior = Prior("table", (0.25, 0.0, 0.5, 0.25, 0.0))
    assert prior.quantile(u) == (1 if u < 0.25 else 3 if u < 0.75 else 4)


def sampled(prior: str, mean: float, sigma: float, cap: int, n: int = 1_000_000) -> np.ndarray:
    """R of n draws by numpy's generators, from the definitions in DepthConfig."""
    rng = np.random.default_rng(11)
    if prior == "poisson":
        depths = np.maximum(1, rng.poisson(mean, n))
    elif prior == "lognormal_poisson":
        depths = 1 + rng.poisson(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, n))
    elif prior == "pln":  # uncapped, a mean of 1 + E[rate]; the caps below are far away
        depths = 1 + rng.poisson(rng.lognormal(math.log(mean - 1) - sigma**2 / 2, sigma, n))
    else:
        depths = rng.integers(1, round(2 * mean - 1), n, endpoint=True)
    return np.minimum(depths, cap)


@pytest.mark.parametrize(
    ("prior", "mean", "sigma", "cap"),
    [
        ("poisson", 8, 0.5, 64),
        ("poisson", 1, 0.5, 64),
        ("poisson", 8, 0.5, 6),
        ("lognormal_poisson", 32, 0.5, 300),
        ("lognormal_poisson", 32, 0.5, 40),
        ("lognormal_poisson", 4, 1.5, 64),
        ("pln", 5, 0.5, 100),
        ("uniform", 8, 0.5, 64),
        ("uniform", 8, 0.5, 10),
    ],
)
def test_probabilities_are_those_of_plain_sampling(prior, mean, sigma, cap):
    law = make_prior(DepthConfig(prior=prior, mean=float(mean), sigma=sigma, cap=cap))
    depths = sampled(prior, mean, sigma, cap)
    n, counts = len(depths), np.bincount(depths, minlength=cap + 1)[1:]
    assert law.name == prior
    assert math.fsum(law.probabilities) == pytest.approx(1.0, abs=1e-12)
    assert len(law.probabilities) <= cap
    assert law.mean == pytest.approx(depths.mean(), abs=4 * depths.std() / math.sqrt(n) + 1e-12)
    for r, count in enumerate(counts, 1):
        p = law.probabilities[r - 1] if r <= len(law.probabilities) else 0.0
        if n * p >= 25:  # 4 sigma of a count that is nearly normal; for rarer depths their sum, below
            assert count / n == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n)), r
    rare = [r for r, p in enumerate(law.probabilities, 1) if n * p < 25]
    expected = n * math.fsum(law.probabilities[r - 1] for r in rare)
    assert abs(sum(int(counts[r - 1]) for r in rare) - expected) <= 4 * math.sqrt(expected) + 4


def test_poisson_is_clamped_to_one_and_capped():
    law = make_prior(DepthConfig(prior="poisson", mean=8.0, cap=200))  # Parcae
    pmf = [math.exp(-8) * 8**k / math.factorial(k) for k in range(60)]
    assert law.probabilities[0] == pytest.approx(pmf[0] + pmf[1], rel=1e-12)
    assert law.probabilities[1:59] == pytest.approx(pmf[2:60], rel=1e-10)
    assert law.mean == pytest.approx(8 + math.exp(-8), abs=1e-9)
    for cap in (1, 2, 3, 9):
        capped = make_prior(DepthConfig(prior="poisson", mean=1.0, cap=cap)).probabilities
        whole = [2 * math.exp(-1), *(math.exp(-1) / math.factorial(k) for k in range(2, 40))]
        assert capped == pytest.approx([*whole[: cap - 1], math.fsum(whole[cap - 1 :])], abs=1e-12)


def test_huginns_mean_is_one_more_than_its_rate():
    wide = make_prior(DepthConfig(prior="lognormal_poisson", mean=32.0, cap=500))
    assert wide.mean == pytest.approx(33.0, abs=1e-4)
    rate_variance = 32**2 * math.expm1(0.25)
    variance = math.fsum(p * (r - 33) ** 2 for r, p in enumerate(wide.probabilities, 1))
    assert variance == pytest.approx(32 + rate_variance, rel=1e-3)
    narrow = make_prior(DepthConfig(prior="lognormal_poisson", mean=32.0, cap=64))
    assert narrow.probabilities[:63] == pytest.approx(wide.probabilities[:63], abs=1e-12)
    assert narrow.probabilities[63] == pytest.approx(math.fsum(wide.probabilities[63:]), abs=1e-12)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("cap", [1, 2, 20, 200])
def test_the_quadrature_is_fine_enough(sigma, cap):
    x = np.linspace(-12, 12, 24001)
    weights, rates = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0]), np.exp(math.log(6) - sigma**2 / 2 + sigma * x)
    expected = [float((weights * np.exp(k * np.log(rates) - rates - math.lgamma(k + 1))).sum()) for k in range(cap - 1)]
    assert lognormal_poisson(6.0, sigma, cap).probabilities[: cap - 1] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("mean", "sigma", "cap"), [(60.0, 2.0, 64), (1.01, 0.5, 64), (33.0, 0.5, 90), (5.0, 1.5, 12)])
def test_the_capped_mean_is_met_at_the_edges(mean, sigma, cap):
    assert pln(mean, sigma, cap).mean == pytest.approx(mean, abs=1e-6)


@given(mean=st.floats(1, 20), cap=st.integers(40, 64))
def test_uniform_keeps_its_mean_between_whole_ends(mean, cap):
    law = make_prior(DepthConfig(prior="uniform", mean=mean, cap=cap))
    assert law.mean == pytest.approx(mean, rel=1e-9)
    assert len(law.probabilities) == math.ceil(2 * mean - 1)
    assert max(law.probabilities) - min(law.probabilities[:-1], default=1.0) < 1e-12 or len(law.probabilities) == 1


def test_a_table_is_normalised_and_capped():
    table = DepthConfig(prior="table", table=(1.0, 0.0, 2.0, 1.0))
    assert make_prior(table).probabilities == (0.25, 0.0, 0.5, 0.25)
    assert make_prior(table.model_copy(update={"cap": 3})).probabilities == (0.25, 0.0, 0.75)
    assert make_prior(table.model_copy(update={"cap": 4})).probabilities == (0.25, 0.0, 0.5, 0.25)
    assert make_prior(table.model_copy(update={"cap": 1})).probabilities == (1.0,)
    for bad in (None, (0.0, 0.0)):
        with pytest.raises(ValueError, match="positive"):
            make_prior(DepthConfig(prior="table", table=bad))


@pytest.mark.parametrize(("start", "end"), [(1.0, 8.0), (12.0, 5.0), (3.3, 3.9), (4.0, 4.0)])
def test_the_curriculum_moves_the_mean_in_eighths(start, end):
    config = DepthConfig(prior="uniform", mean=end, curriculum=start, curriculum_share=0.5)
    means = [mean_at(config, step / 1000) for step in range(1001)]
    assert means[0] == start
    assert set(means[500:]) == {end}
    assert means == sorted(means, reverse=start > end)
    assert len(set(means)) <= 8 * abs(end - start) + 2
    for step in range(500):
        assert means[step] == pytest.approx(start + (end - start) * step / 500, abs=1 / 16 + 1e-9)
        assert 8 * (means[step] - start) == pytest.approx(round(8 * (means[step] - start)), abs=1e-9) or means[step] == end


@pytest.mark.parametrize("prior", ["poisson", "lognormal_poisson", "pln", "uniform", "fixed"])
def test_the_curriculum_ends_at_the_law_without_one(prior):
    plain = DepthConfig(prior=prior, mean=5.0, cap=32)
    moving = plain.model_copy(update={"curriculum": 2.0})
    begin = plain.model_copy(update={"mean": 2.0})
    assert make_prior(moving, 0.0) == make_prior(begin)
    assert make_prior(moving, 0.25) == make_prior(moving) == make_prior(plain) == make_prior(plain, 0.0)
    assert make_prior(moving.model_copy(update={"curriculum_share": 0.0}), 0.0) == make_prior(plain)
    halfway = make_prior(moving, 0.125)
    assert make_prior(begin).mean < halfway.mean < make_prior(plain).mean


def test_a_law_is_built_once_and_kept_with_its_holder():
    law = DepthLaw(DepthConfig(prior="pln", cap=24, mean=4.0, curriculum=2.0, curriculum_share=1.0))
    built = [law.at(step / 500) for step in range(501)]
    assert len({id(prior) for prior in built}) == 17
    assert built[250] == make_prior(law.config, 0.5)
    assert built[-1] is law.at(1.0)
    assert law == DepthLaw(law.config)


def test_a_fixed_depth_moves_by_whole_visits():
    law = DepthLaw(DepthConfig(prior="fixed", mean=4.0, curriculum=1.0, curriculum_share=1.0))
    depths = [draw_depths(law.at(step / 99), 1, step, 1)[0] for step in range(100)]
    assert depths == sorted(depths)
    assert set(depths) == {1, 2, 3, 4}
