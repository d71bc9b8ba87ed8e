"""Run by tests: `loopscale train`, but in the midst of a step one rank is killed, falls silent, or raises.

LOST_RANK, LOST_STEP (from 1) and LOST_HOW (kill, stop or raise) say which, when and how: in its first visit of the second
microbatch. It pauses there first, so that what it was doing has been reported.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from loopscale.cli import main
from loopscale.errors import DataError
from loopscale.model.stage import LoopedStage

LOST = os.environ["RANK"] == os.environ["LOST_RANK"]
STEP = int(os.environ["LOST_STEP"]) - 1
visit_of_stage = LoopedStage.visit
visits = 0


def faulty_visit(stage, inputs, feed, state, visit):
    global visits
    visits += inputs.training and inputs.step == STEP and visit == 1
    if LOST and visits == 2:
        time.sleep(2)
        fault()
    return visit_of_stage(stage, inputs, feed, state, visit)


def fault():
    how = os.environ["LOST_HOW"]
    if how == "raise":
        raise DataError("shard 3 is damaged")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


LoopedStage.visit = faulty_visit
sys.exit(main(sys.argv[1:]))
