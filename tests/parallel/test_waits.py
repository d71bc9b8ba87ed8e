"""Waits are timed, and whose they were is kept where they fail."""

from __future__ import annotations

import time

import pytest
import torch

from loopscale.parallel.waits import Waits


def test_seconds_add_up_and_a_failed_wait_leaves_its_rank_named():
    waits = Waits(torch.device("cpu"))
    for _ in range(3):
        with waits.waiting(4):
            assert waits.waiting_for == 4
            time.sleep(0.02)
        assert waits.waiting_for is None
    before = waits.seconds()
    assert before >= 0.06
    time.sleep(0.02)
    assert waits.seconds() == before  # work is not counted
    with pytest.raises(RuntimeError), waits.waiting(2):
        raise RuntimeError("Connection closed by peer")
    assert waits.waiting_for == 2
