"""Run by tests: `loopscale train`, but in the midst of a step one rank is killed, falls silent, raises, sleeps, or has a bit of
its weights flipped; or it is slow at every visit.

LOST_RANK, LOST_STEP (from 1) and LOST_HOW (kill, stop, raise, sleep, flip; or slow) say which, when and how: in its first visit
of the second microbatch. It pauses there first, so that what it was doing has been reported. A sleep, or the pause at every
visit, takes LOST_SECONDS.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from loopscale.cli import main
from loopscale.errors import DataError
from loopscale.model.stage import LoopedStage

LOST = os.environ["RANK"] == os.environ["LOST_RANK"]
STEP = int(os.environ["LOST_STEP"]) - 1
HOW = os.environ["LOST_HOW"]
SECONDS = float(os.environ.get("LOST_SECONDS", "0"))
visit_of_stage = LoopedStage.visit
visits = 0


def faulty_visit(stage, inputs, feed, state, visit):
    global visits
    visits += inputs.training and inputs.step == STEP and visit == 1
    if LOST and HOW == "slow":
        time.sleep(SECONDS)
    elif LOST and visits == 2:
        visits += 1
        time.sleep(2)
        fault(stage)
    return visit_of_stage(stage, inputs, feed, state, visit)


def fault(stage):
    match HOW:
        case "raise":
            raise DataError("shard 3 is damaged")
        case "sleep":
            time.sleep(SECONDS)
        case "flip":  # a middle bit of the mantissa, in a parameter of the core
            next(stage.core_block.parameters()).data.view(torch.int32)[3] ^= 1 << 12
        case _:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[HOW])


LoopedStage.visit = faulty_visit
sys.exit(main(sys.argv[1:]))
