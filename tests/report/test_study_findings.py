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
        (Estimate(2.0e-8, 1.2e-8, 3), False, "2e-08 ± 1.2e-08"),
        (Estimate(0.5, 1e-8, 3), False, "0.500000 ± 0.000000"),
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


def test_an_arm_that_breaks_off_is_named_and_not_compared():
    broken = {"a": course(1, 2), "b": {10: Estimate(1, None, 1), 200: Estimate(9, None, 1)}}
    assert findings.loss_course_finding(broken) == (
        "Held-out loss ends at 2.000 nats after 500 steps; not a number: b after step 200"
    )
    assert findings.scale_finding(broken) == "From step 10 to 500 the state grows 2.00× in a; not a number: b after step 200"


def test_norms_at_the_end():
    say = findings.final_norm_finding
    a, b = Estimate(39207.0, 120.0, 3), Estimate(17.2, 0.4, 3)
    assert say({"a": a, "b": b}, 2) == (
        "a's states end largest, with a norm of 39,207 ± 120: 2,279× that of b's, the smallest, 17.20 ± 0.40"
    )
    assert say({"b": b}, 2) == "b's states end with a norm of 17.20 ± 0.40"
    assert say({"a": b, "b": b}, 2) == "The states of all arms end about as large, with norms of 17.20 ± 0.40 to 17.20 ± 0.40"


def test_gains_of_loops():
    gains, gaps = {"a": Estimate(0.22, 0.01, 3), "b": Estimate(-0.01, 0.002, 3)}, {"a": Estimate(1.04, None, 1)}
    assert findings.gain_finding(gains, gaps | {"b": Estimate(0.998, None, 1)}) == (
        "Loops after the first lower perplexity most in a, by 0.220 ± 0.010 (1.04×),"
        " and raise it most in b, by 0.0100 ± 0.0020 (1.00×)"
    )
    worse = {"a": Estimate(-3.0, None, 1), "b": Estimate(-1.0, None, 1)}
    assert findings.gain_finding(worse, gaps | {"b": Estimate(0.9, None, 1)}) == (
        "Loops after the first raise perplexity most in a, by 3 (1.04×), and least in b, by 1 (0.90×)"
    )
    assert findings.gain_finding({"a": worse["a"]}, gaps) == "Loops after the first raise perplexity in a, by 3 (1.04×)"
    assert (
        findings.gain_finding({"a": gains["a"]}, gaps) == "Loops after the first lower perplexity in a, by 0.220 ± 0.010 (1.04×)"
    )


def test_what_a_loss_sees():
    say = findings.radial_finding
    assert say({"a": 4e-8, "b": 1e-9}, 2) == (
        "The last loop's loss is blind to the state's scale in all arms: at most 4.0e-08 of its gradient is radial"
    )
    assert (
        say({"a": 4e-8}, 1)
        == "The last loop's loss is blind to the state's scale in a: at most 4.0e-08 of its gradient is radial"
    )
    assert "blind to the state's scale in all 2 arms that tell: " in say({"a": 4e-8, "b": 1e-9}, 3)
    assert say({"a": 0.04}, 1) == "The last loop's loss sees the state's scale in a: 4.0e-02 of its gradient is radial"
    assert say({"a": 0.04, "b": 0.01}, 2) == "Of the gradient of the last loop's loss 4.0e-02 is radial in a, 1.0e-02 in b"


def test_tails_of_norms():
    say = findings.tail_finding
    assert say({"a": 4.5, "b": 1.02}, 2) == (
        "Of a's tokens the norm's 99th percentile is 4.50× the median, the widest spread; of b's 1.02×"
    )
    assert say({"a": 4.5}, 1) == "Of a's tokens the norm's 99th percentile is 4.50× the median"
    assert say({}, 1) == "Norms of tokens"


def test_the_largest_change_by_a_clamp_may_be_a_fall():
    changes = {"rms": {"a": Estimate(0.004, None, 1)}, "radial": {"a": Estimate(-0.0055, None, 1)}}
    assert findings.clamp_finding(changes) == (
        "Clamping the state's scale changes the loss most in a: -0.0055 nats with states moved without radial part"
    )


def test_a_frontier_on_which_nothing_is_faster():
    assert findings.frontier_finding({"a at depth 3": (60.0, 900.0), "a at depth 1": (61.0, 2000.0)}, 1.01) == (
        "The lowest perplexity is 60.0, of a at depth 3; nothing within 1.01× of it is faster"
    )
