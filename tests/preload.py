"""Imported by the server that :mod:`tests.launch` forks processes from: whatever takes seconds, and is then shared by all."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import deepspeed  # noqa: F401
import megatron.core.tensor_parallel  # noqa: F401
import streaming  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401

import loopscale.inference.load
import loopscale.train.run  # noqa: F401
import tests.launch  # noqa: F401  # what a process begins with

if len(os.listdir("/proc/self/task")) > 1:
    names = sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    raise RuntimeError(f"an import has started threads, which a fork would lose with whatever they hold: {names}")
sys.stdout.flush()  # or every process would print it again
gc.collect()
gc.freeze()  # what is shared stays so, and need not be searched
