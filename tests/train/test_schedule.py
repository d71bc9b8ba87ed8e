"""Learning rates at the corners of each schedule."""

from __future__ import annotations

import pytest

from loopscale.config.tree import OptimizerConfig
from loopscale.train.schedule import learning_rate


def rates(steps: int = 100, **changes) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup=0.1, decay_share=0.2, final=0.1, **changes)
    return [learning_rate(config, step, steps) for step in range(steps)]


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
    assert [learning_rate(config, s, 5) for s in range(5)] == [1.0] * 5
