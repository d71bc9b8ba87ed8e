"""Estimates over seeds against numpy's, and against numbers that can be worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from loopscale.report.statistics import (
    Estimate,
    estimate,
    mean_law,
    paired_difference,
    rounded,
    thinned,
    total_variation,
)


def test_an_estimate_is_the_mean_and_its_standard_error():
    assert estimate([1.0, 2.0, 6.0]) == Estimate(3.0, math.sqrt(7) / math.sqrt(3), 3)  # deviations -2, -1, 3: s² = 14 / 2
    values = np.random.default_rng(1).normal(4.0, 0.1, 7)
    found = estimate(values.tolist())
    assert found is not None and found.n == 7
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert found.error == pytest.approx(np.std(values, ddof=1) / np.sqrt(7), rel=1e-12)


def test_one_seed_has_no_error_and_none_no_estimate():
    assert estimate([2.5]) == Estimate(2.5, None, 1)
    assert estimate([]) is None
    assert estimate([None, None]) is None
    assert estimate([None, 2.0, 4.0]) == Estimate(3.0, 1.0, 2)


def test_a_paired_difference_is_that_of_the_seeds_that_both_have():
    arm = {1: 4.1, 2: 5.3, 3: 3.9, 5: None}
    reference = {2: 5.0, 1: 4.0, 4: 9.0, 5: 1.0}
    found = paired_difference(arm, reference)
    assert found is not None and found.n == 2
    assert found.mean == pytest.approx(0.2) and found.error == pytest.approx(0.1)  # 0.1 and 0.3
    assert paired_difference({1: 1.0}, {2: 1.0}) is None
    assert paired_difference({1: None}, {1: 1.0}) is None


def test_pairing_takes_away_what_a_seed_does_to_both():
    reference = {1: 4.0, 2: 5.0, 3: 6.0}
    found = paired_difference({seed: value + 0.25 for seed, value in reference.items()}, reference)
    assert found == Estimate(0.25, 0.0, 3)


def test_a_mean_law_takes_the_shorter_as_zero_beyond_its_end():
    assert mean_law([[0.5, 0.5], [0.25, 0.25, 0.5]]) == [0.375, 0.375, 0.25]
    assert mean_law([[1.0]]) == [1.0]


def test_total_variation():
    assert total_variation([1.0], [0.0, 1.0]) == 1.0
    assert total_variation([0.5, 0.5], [0.25, 0.5, 0.25]) == 0.25
    assert total_variation([0.3, 0.7], [0.3, 0.7]) == 0.0


@pytest.mark.parametrize(("count", "most"), [(300, 40), (41, 40), (40, 40), (3, 40), (1, 2), (0, 2), (7, 2)])
def test_thinning_keeps_the_ends_the_order_and_the_spacing(count, most):
    found = thinned(range(count), most)
    assert len(found) == min(count, most)
    assert found[:1] == list(range(count))[:1] and found[-1:] == list(range(count))[-1:]
    gaps = {after - before for before, after in pairwise(found)}
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)


def test_rounding_is_to_significant_digits():
    assert [rounded(value) for value in (0.000123456, 1234.56, 0.0, 5.0)] == [0.0001235, 1235.0, 0.0, 5.0]
