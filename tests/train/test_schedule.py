"""Learning rates at the corners of each schedule."""

from __future__ import annotations

import pytest

from loopscale.config.tree import OptimizerConfig
from loopscale.train.schedule import share_of_peak


def rates(steps: int = 100, **changes) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup=0.1, decay_share=0.2, final=0.1, **changes)
    return [share_of_peak(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_warm_up_is_linear_to_the_peak(schedule):
    found = rates(schedule=schedule)
    assert found[0] == pytest.approx(1e-4 + (1 - 1e-4) * 0.1)
    assert found[9] == pytest.approx(1.0)
    assert found[4] - found[3] == pytest.approx(found[3] - found[2])


def test_wsd_is_flat_then_falls_along_a_cosine():
    found = rates(schedule="wsd")
    assert found[9:80] == [1.0] * 71
    assert found[89] == pytest.approx(0.55)  # half way from 1 to 0.1
    assert found[99] == pytest.approx(0.1)


def test_cosine_ends_at_its_last_value():
    found = rates(schedule="cosine")
    assert found[54] == pytest.approx(0.55)
    assert found[99] == pytest.approx(0.1)


def test_constant_stays():
    assert rates(schedule="constant")[10:] == [1.0] * 90


def test_no_warm_up_and_no_decay():
    config = OptimizerConfig(lr=1.0, warmup=0.0, decay_share=0.0)
    assert [share_of_peak(config, s, 5) for s in range(5)] == [1.0] * 5


def test_a_linear_wsd_falls_along_a_line_to_zero():
    config = OptimizerConfig(warmup=0.0, decay_share=0.5, decay_shape="linear", final=0.0)
    found = [share_of_peak(config, step, 100) for step in range(100)]
    assert found[:50] == [1.0] * 50
    assert found[74] == pytest.approx(0.5)
    assert found[50:] == pytest.approx([1.0 - 0.02 * k for k in range(1, 51)])


def test_a_linear_wsd_ends_at_its_last_value():
    assert rates(schedule="wsd", decay_shape="linear")[89::10] == pytest.approx([0.55, 0.1])


def test_the_decay_shape_belongs_to_wsd():
    assert rates(schedule="cosine", decay_shape="linear") == rates(schedule="cosine")
