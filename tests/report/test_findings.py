"""The sentences above the figures, on data made by hand."""

from __future__ import annotations

import math

import pytest

from loopscale.report.findings import depth_finding, loss_finding, norm_finding, number, perplexity_finding

NGRAMS = {"unigram": math.log(571), "bigram": math.log(63)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(1020.4, "1,020"), (231.0, "231"), (94.31, "94.3"), (4.612, "4.61"), (0.0523, "0.052"), (0.0, "0"), (3.2e8, "3.2e+08")],
)
def test_number(value, text):
    assert number(value) == text


def test_loss():
    losses = {10: 8.314, 250: 5.0, 500: 4.61}
    assert loss_finding(losses, {}, None, {}) == "Training loss falls from 8.31 to 4.61 nats in 500 steps"
    assert loss_finding({10: 4.0, 20: 5.0}, {}, None, {}) == "Training loss rises from 4.00 to 5.00 nats in 20 steps"
    assert loss_finding({10: 8.3}, {}, None, NGRAMS) == "Training loss is 8.30 nats at step 10, the only one logged"
    assert loss_finding({}, {}, None, NGRAMS) == "No finite loss has been logged"


@pytest.mark.parametrize(
    ("validation", "end"),
    [
        ({500: 4.55}, "4.55, between unigram and bigram"),
        ({500: 7.0}, "7.00, above unigram"),
        ({500: 3.9}, "3.90, below bigram"),
        (
            {100: 4.2, 500: 4.55},
            "4.55, up from its best 4.20 at step 100, between unigram and bigram",
        ),
        ({100: 4.53, 500: 4.55}, "4.55, between unigram and bigram"),
    ],
)
def test_loss_with_validation(validation, end):
    assert loss_finding({10: 8.0, 500: 4.6}, validation, "5", NGRAMS).endswith(f"; validation at depth 5 ends at {end}")


@pytest.mark.parametrize(
    ("perplexities", "sentence"),
    [
        ((231, 141, 99, 94.3, 93.9, 93.7, 93.8), "falls from 231 at depth 1 to 94.3 at depth 4 and is flat to depth 7"),
        ((231, 141, 94, 94.5, 140), "falls from 231 at depth 1 to 94.0 at depth 3 and rises to 140 at depth 5"),
        ((231, 141, 94), "falls from 231 at depth 1 to 94.0 at depth 3, the deepest evaluated"),
        ((100, 100.5, 99.9), "is 100 at depth 1 and is flat to depth 3"),
        ((100, 120, 150), "is 100 at depth 1 and rises to 150 at depth 3"),
        ((100, 90, 120, 90), "falls from 100 at depth 1 to 90.0 at depth 2 and stays between 90.0 and 120 to depth 4"),
        ((100,), "is 100 at depth 1, the only depth evaluated"),
    ],
)  # fmt: skip
def test_perplexity(perplexities, sentence):
    assert perplexity_finding(dict(enumerate(perplexities, 1))) == f"Perplexity {sentence}"


def test_perplexity_without_an_evaluation():
    assert perplexity_finding({}) == "No evaluation yet"


def test_depths():
    pmf = [0.25, 0.5, 0.25]
    assert depth_finding({1: 26, 2: 50, 3: 24}, pmf) == "The 100 logged depths average 2.0, in line with the prior's mean of 2.0"
    assert depth_finding({3: 60, 2: 40}, pmf) == "The 100 logged depths average 2.6, away from the prior's mean of 2.0"
    assert depth_finding({4: 200}, [0, 0, 0, 1.0]) == "All 200 logged depths are 4, in line with the prior's mean of 4.0"
    assert depth_finding({4: 1}, []) == "The only depth logged is 4"
    assert depth_finding({}, pmf) == "No depths have been logged"


def test_norms():
    # Compared at loop 2, the last that both have.
    assert norm_finding((10, [1.0, 2.0, 4.0]), (500, [1.0, 1.01])) == (
        "Over 2 loops at step 500 the state keeps its scale, and is 0.51× as large as at step 10"
    )
    assert norm_finding((10, [1.0, 1.8]), (500, [1.0, 1.8])) == (
        "Over 2 loops at step 500 the state grows 1.80×, and is as large as at step 10"
    )
    assert norm_finding((10, [2.0, 1.0]), (10, [2.0, 1.0])) == "Over 2 loops at step 10 the state shrinks to 0.50×"
    assert norm_finding((10, [2.0]), (10, [2.0])) == "At step 10 the state was looped once"
    assert "inf×" in norm_finding((10, [0.0]), (20, [1.0]))
