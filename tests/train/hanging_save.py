"""Run by tests: `loopscale train`, but the second commit of a checkpoint never ends."""

from __future__ import annotations

import sys
import time

from loopscale.checkpoint import commit
from loopscale.cli import main

commits = 0
commit_of_protocol = commit.commit


def hanging_commit(writing):
    global commits
    commits += 1
    if commits == 2:
        time.sleep(3600)
    return commit_of_protocol(writing)


commit.commit = hanging_commit
sys.exit(main(sys.argv[1:]))
