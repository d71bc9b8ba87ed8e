"""Run by tests: `loopscale train`, but the loss of the global samples in SPIKY_SAMPLES is threefold."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from loopscale.cli import main
from loopscale.model.stage import LoopedStage

SPIKY = {int(s) for s in os.environ["SPIKY_SAMPLES"].split()}
exit_of_stage = LoopedStage.exit


def spiky_exit(stage, inputs, exit, states):
    loss = exit_of_stage(stage, inputs, exit, states)
    if inputs.training and SPIKY & set(inputs.samples.tolist()):
        return replace(loss, tokens={name: 3 * term for name, term in loss.tokens.items()}, losses=3 * loss.losses)
    return loss


LoopedStage.exit = spiky_exit
sys.exit(main(sys.argv[1:]))
