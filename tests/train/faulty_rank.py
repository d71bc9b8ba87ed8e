"""Run by tests: `loopscale train`, but one rank's loss is NaN at the steps named by FAULTY_STEPS; with FAULTY_SAMPLE, that of
the microbatch with this global sample."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from loopscale.cli import main
from loopscale.model.stage import LoopedStage

FAULTY_RANK = int(os.environ.get("FAULTY_RANK", "1"))
FAULTY_STEPS = {int(s) for s in os.environ["FAULTY_STEPS"].split(",")}
FAULTY_SAMPLE = os.environ.get("FAULTY_SAMPLE")
exit_of_stage = LoopedStage.exit


def faulty_exit(stage, inputs, exit, states):
    loss = exit_of_stage(stage, inputs, exit, states)
    if not (os.environ["RANK"] == str(FAULTY_RANK) and inputs.training and inputs.step in FAULTY_STEPS):
        return loss
    if FAULTY_SAMPLE is not None and int(FAULTY_SAMPLE) not in inputs.samples:
        return loss
    return replace(loss, tokens={name: term * torch.nan for name, term in loss.tokens.items()})


LoopedStage.exit = faulty_exit
sys.exit(main(sys.argv[1:]))
