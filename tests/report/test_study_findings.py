"""The sentences of a study's figures in the cases that the made-up study does not reach."""

from __future__ import annotations

import pytest

from loopscale.report import study_findings as findings
from loopscale.report.statistics import Estimate


def course(first: float, last: float) -> dict[int, Estimate]:
    return {10: Estimate(first, None, 1), 500: Estimate(last, None, 1)}


@pytest.mark.parametrize(
    ("value", "signed", "text"),
    [
        (Estimate(94.3217, 0.4213, 3), False, "94.32 ± 0.42"),
        (Estimate(-0.02413, 0.00397, 3), True, "-0.0241 ± 0.0040"),
        (Estimate(0.5, 0.0, 3), True, "+0.5 ± 0"),
        (Estimate(0.5, 1e-17, 3), False, "0.5 ± 0"),
        (Estimate(94.3217, None, 1), False, "94.32"),
        (Estimate(12345.6, None, 1), False, "12,346"),
        (Estimate(12345.6, 123.0, 2), False, "12,346 ± 123"),
    ],
)
def test_a_measured_value_shows_two_digits_of_its_error(value, signed, text):
    assert findings.measured(value, signed) == text


def test_a_law_whose_likeliest_depth_stays():
    say = findings.law_moved_finding
    assert say("a", [0.4, 0.6], [0.2, 0.8]) == "a: the likeliest depth stays 2; its probability rises from 0.60 to 0.80"
    assert say("a", [0.4, 0.6], [0.45, 0.55]) == "a: the likeliest depth stays 2; its probability falls from 0.60 to 0.55"
    assert say("a", [0.6, 0.1, 0.3], [0.6, 0.3, 0.1]) == (
        "a: the likeliest depth stays 1, at p = 0.60; the law changes around it"
    )


def test_laws_at_the_end():
    assert findings.final_law_finding({"a": 1.5}) == "a's law ends with an entropy of 1.50 nats"
    assert findings.final_law_finding({"a": 1.5, "b": 1.502}) == (
        "The laws of all arms end as broad as each other, with an entropy of 1.50 nats"
    )


def test_the_course_of_a_law():
    say = findings.law_course_finding
    assert say("mean", {"a": course(5, 5.001), "b": course(4, 4)}) == "The mean of the law stays as it began in all arms"
    assert say("mean", {"a": course(5, 5)}) == "The mean of the law stays as it began"
    assert say("mean", {"a": course(5, 4.5)}) == "The mean of the law falls in a from 5.00 to 4.50"


def test_perplexity_where_the_reference_is_best_or_lacks_the_depth():
    say = findings.final_perplexity_finding
    a, b, worse = Estimate(90.0, 1.0, 3), Estimate(95.0, 2.0, 3), Estimate(0.05, 0.01, 3)
    assert say(5, {"a": a, "b": b}, "a", {"b": worse}) == (
        "At depth 5 a has the lowest perplexity, 90.0 ± 1.0, against 95.0 ± 2.0 of b (b - a: +0.050 ± 0.010 nats, paired by seed)"
    )
    assert say(5, {"a": a, "b": b}, "c", {}) == "At depth 5 a has the lowest perplexity, 90.0 ± 1.0, against 95.0 ± 2.0 of b"
    assert say(5, {"a": a}, "a", {}) == "At depth 5 a has perplexity 90.0 ± 1.0"
    assert say(5, {}, "a", {}) == "No finite held-out loss at depth 5"


def test_the_states_scale():
    say = findings.scale_finding
    assert say({"a": course(1, 1.01)}) == "From step 10 to 500 the state keeps its scale"
    assert say({"a": course(1, 1), "b": course(2, 2)}) == "From step 10 to 500 the state keeps its scale in all arms"
    assert (
        say({"a": course(1, 18), "b": course(2, 1)}) == "From step 10 to 500 the state grows 18.0× in a and shrinks to 0.50× in b"
    )


def test_held_out_loss_of_one_arm():
    assert findings.loss_course_finding({"a": course(6, 4.5)}) == "Held-out loss ends at 4.500 nats after 500 steps"
