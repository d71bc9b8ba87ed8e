"""Run by tests: `loopscale train`, but the rank SILENT falls silent in the midst of writing its part of the first checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time

from loopscale.checkpoint.parts import PartWriter
from loopscale.cli import main

write_data = PartWriter.write_data


def silent_write(writer, plan, planner):
    if os.environ["RANK"] == os.environ["SILENT"]:
        time.sleep(2)  # what it does has been reported
        os.kill(os.getpid(), signal.SIGSTOP)
    return write_data(writer, plan, planner)


PartWriter.write_data = silent_write
sys.exit(main(sys.argv[1:]))
