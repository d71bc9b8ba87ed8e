"""What ranks make sure of before they begin."""

from __future__ import annotations

import pytest

from loopscale.config import Config
from loopscale.errors import ClusterError
from loopscale.parallel.mesh import Mesh, require_same


def said_of(mesh: Mesh, rates: list[float]) -> str:
    """What a rank says when each was started with its own learning rate; nothing where it goes on."""
    try:
        require_same(Config.model_validate({"optimizer": {"lr": rates[mesh.rank]}}))
    except ClusterError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_ranks_with_different_configurations_do_not_begin(ranks):
    sentence = "optimizer.lr is 0.0001 on rank 1 and 0.003 on rank 0; start all ranks with one configuration"
    assert ranks.run(said_of, 2, [3e-3, 1e-4]) == [sentence] * 2
    assert ranks.run(said_of, 2, [3e-3, 3e-3]) == [""] * 2
