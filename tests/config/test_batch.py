"""Batch arithmetic: any two sizes give the third, and what cannot be cut is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscale.config.batch import settle
from loopscale.config.tree import BatchConfig
from loopscale.errors import ConfigError

sizes = st.integers(1, 12)


@given(groups=sizes, dp=sizes, micro=sizes, per_group=sizes)
def test_any_two_give_the_third(groups, dp, micro, per_group):
    total, accumulation = groups * dp * micro * per_group, groups * per_group
    whole = {"global_batch": total, "microbatch": micro, "accumulation": accumulation}
    for left_out in whole:
        given_two = {k: v for k, v in whole.items() if k != left_out}
        batch = settle(BatchConfig(**given_two), groups, dp)
        assert (batch.global_batch, batch.microbatch, batch.accumulation) == (total, micro, accumulation)
        assert batch.microbatches_per_group * batch.microbatch * dp * groups == total


@given(total=st.integers(1, 200), micro=st.none() | sizes, accumulation=st.none() | sizes, groups=sizes, dp=sizes)
def test_what_is_settled_is_cut_evenly_and_the_rest_refused(total, micro, accumulation, groups, dp):
    config = BatchConfig(global_batch=total, microbatch=micro, accumulation=accumulation)
    try:
        batch = settle(config, groups, dp)
    except ConfigError as error:
        assert error.problems[0].sentence
        cuts = [m for m in range(1, total + 1) if total % (groups * dp * m) == 0 and micro in (None, m)]
        assert not any(accumulation in (None, total // (m * dp)) for m in cuts) or accumulation is None is micro
        return
    assert batch.group * groups == total
    assert batch.group_per_rank * dp == batch.group
    assert batch.microbatches_per_group * batch.microbatch == batch.group_per_rank
    assert batch.accumulation * batch.microbatch * dp == total


def test_nothing_given_is_refused():
    with pytest.raises(ConfigError, match="must be given, or both"):
        settle(BatchConfig(microbatch=2), 1, 1)
