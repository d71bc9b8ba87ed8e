"""How fast this machine multiplies matrices, with how many threads, and in which type."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

import torch

from loopscale.config.tree import Config

_DENSE_BF16_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12}
"""Dense (not sparse) bf16 peaks, from the vendors' data sheets; the SXM parts where there are several."""


def set_threads(threads: int | None, local_size: int) -> int:
    """CPU threads of this rank: as asked, or the machine's cores shared evenly; returns the number set."""
    count = threads or max(1, len(os.sched_getaffinity(0)) // local_size)
    torch.set_num_threads(count)
    return count


def compute_type(config: Config, device: torch.device) -> torch.dtype:
    """The type of the visits: bf16 on a GPU and fp32 on a CPU unless the configuration says."""
    bf16 = config.train.precision == "bf16" or (config.train.precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def matmul_rate(shapes: Sequence[tuple[int, int]], tokens: int, device: torch.device, seconds: float = 0.4) -> float | None:
    """Operations per second that this machine reaches on products of ``tokens`` rows with each (inputs, outputs).

    On a CPU it is measured, forward and both backward products of every shape, weighted as a training step weights
    them; on a GPU it is the data sheet's dense bf16 peak, and None for one that is not in the table.
    """
    if device.type == "cuda":
        words = re.split(r"[\s-]+", torch.cuda.get_device_name(device))
        return next((peak for part, peak in _DENSE_BF16_PEAK.items() if part in words), None)
    operands = [(torch.randn(tokens, i), torch.randn(o, i), torch.randn(tokens, o)) for i, o in shapes]
    operations = sum(6 * tokens * i * o for i, o in shapes)
    best = float("inf")
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        for x, weight, gradient in operands:
            torch.mm(x, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)
        best = min(best, time.perf_counter() - before)
    return operations / best
