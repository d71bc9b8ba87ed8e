"""Shared fixtures: few threads, quiet libraries, one process group per test process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def mesh():
    """Megatron's groups of a single process."""
    import torch

    from loopscale.config.tree import ParallelConfig
    from loopscale.parallel import mesh

    torch.set_num_threads(1)
    return mesh.start(ParallelConfig())
