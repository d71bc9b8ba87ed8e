"""Replicas that hold the same weights pass; one flipped bit is found, and whose it is where that can be told."""

from __future__ import annotations

import socket

import pytest
import torch

from loopscale.config import Config
from loopscale.config.tree import ParallelConfig
from loopscale.errors import ClusterError
from loopscale.model.stage import LoopedStage
from loopscale.parallel.mesh import Mesh
from loopscale.train.replicas import check_replicas
from tests.conftest import TINY

HOST = socket.gethostname()


def said(mesh: Mesh, slices: tuple[int, ...], flips: list[tuple[int, str, int]]) -> list[str]:
    """What a rank says of its replicas at first, and after each of some flips: on a rank, in a parameter, of an element."""
    model = Config.model_validate({**TINY, "model": {**TINY["model"], "vocab_size": 100}}).model
    stage, sentences = LoopedStage(model, 32, seed=1, place=mesh.place(slices)), []
    for rank, name, element in [(-1, "", 0), *flips]:
        if mesh.rank == rank:
            dict(stage.named_parameters())[name].data.view(torch.int32).flatten()[element] ^= 1
        try:
            check_replicas(stage, mesh)
            sentences.append("")
        except ClusterError as error:
            sentences.append(str(error))
    return sentences


END = "; go on from the last checkpoint with --resume auto; if it happens again, the machine of"
NORM, QKV = "core_block.layers.0.input_layernorm.weight", "core_block.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "layout", "slices", "flips", "expected"),
    [
        (
            3, {}, (2,), [(2, QKV, 100)],
            f"core.0.q, core.0.k, core.0.v on rank 2 (stage 0, {HOST}) is not what 2 other ranks hold{END} that rank is suspect",
        ),
        (
            4, {"pipeline": 2}, (0, 2), [(3, QKV, 100)],  # replicas: ranks 0 and 1, 2 and 3
            f"core.0.q, core.0.k, core.0.v on rank 2 (stage 1, {HOST}), rank 3 (stage 1, {HOST}) should be the same on all of "
            f"them and is not{END} one of these ranks is suspect",
        ),
        (  # a parameter that tensor-parallel ranks have a share of each, and one that they hold alike
            4, {"tensor": 2}, (2,), [(3, QKV, 100), (3, NORM, 1)],
            f"core.0.attention_norm on rank 3 (stage 0, tensor rank 1, {HOST}) is not what 3 other ranks hold{END} that rank is "
            f"suspect",
        ),
        (2, {"tensor": 2}, (2,), [(0, QKV, 100)], ""),  # each has its own share, and there is no replica to compare with
    ],
    ids=["dp3", "pp2-dp2", "tp2-dp2", "tp2"],
)  # fmt: skip
def test_one_bit_is_found(ranks, size, layout, slices, flips, expected):
    parallel = ParallelConfig(**layout)
    for sentences in ranks.run(said, size, slices, flips, parallel=parallel):
        assert sentences[0] == ""
        assert sentences[-1] == (expected and f"replicas have come apart: {expected}")
