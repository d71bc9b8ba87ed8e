"""Run by tests: `loopscale train`, but the law of the depths learns: every depth gains the loss per token that it met."""

from __future__ import annotations

import sys

from loopscale.cli import main
from loopscale.train import step
from tests.train.test_controller import Drift


class DriftingLaw(Drift):
    def __init__(self, config) -> None:
        super().__init__()


step.make_law = DriftingLaw
sys.exit(main(sys.argv[1:]))
