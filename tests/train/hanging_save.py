"""Run by tests: `loopscale train`, but the second commit of a checkpoint never ends."""

from __future__ import annotations

import sys
import time

from loopscale.checkpoint.commit import Folder
from loopscale.cli import main

commits = 0
publish_of_folder = Folder.publish


def hanging_publish(folder, step):
    global commits
    commits += 1
    if commits == 2:
        time.sleep(3600)
    return publish_of_folder(folder, step)


Folder.publish = hanging_publish
sys.exit(main(sys.argv[1:]))
