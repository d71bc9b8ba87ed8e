"""Whether all replicas hold the same weights: they began alike and took the same updates, so every bit must be the same.

Under ZeRO 0 what has come apart stays apart, and is found. Under ZeRO 1 every replica is sent all weights anew after each
update, each part by the one rank that keeps it: what shows is a fault of that exchange, or since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loopscale.diagnostics.digest import element_digest
from loopscale.errors import ClusterError
from loopscale.model.stage import LoopedStage
from loopscale.model.weights import Holder
from loopscale.parallel.mesh import Mesh, gather_objects

NAMED = 8
"""Ranks that are named at most."""


@dataclass(frozen=True)
class Held:
    """What one rank holds: digests of its parameters, by their place in the model's table."""

    role: str
    tensor_rank: int
    digests: Mapping[int, int]


def check_replicas(stage: LoopedStage, mesh: Mesh) -> None:
    """Compares the parameters of all ranks that should hold the same. A collective; it reads every parameter once.

    Raises :class:`ClusterError`, the same on every rank, when any bit differs.
    """
    if mesh.data_size * mesh.tensor_size == 1:
        return
    parameters = dict(stage.named_parameters())
    own = {i: parameters[h.parameter] for i, h in enumerate(stage.table) if h.parameter in parameters}
    mesh.watch.doing = "comparing its weights with those of other replicas"
    digests = torch.stack([element_digest(p, p.shape, (0,) * p.dim()) for p in own.values()])
    ranks = gather_objects(Held(mesh.watch.role, mesh.tensor_rank, dict(zip(own, digests.tolist(), strict=True))))
    difference = first_difference(stage.table, ranks)
    if difference is not None:
        raise ClusterError(difference)


def first_difference(table: Sequence[Holder], ranks: Sequence[Held]) -> str | None:
    """A sentence on the first parameter of ``table`` that is not the same on all its ranks: those of all replicas, and also on
    all tensor-parallel ranks where it is not divided over these. Where most agree, it names the others."""
    for place, holder in enumerate(table):
        peers: dict[int, dict[int, list[int]]] = {}  # by share, by digest
        for rank, held in enumerate(ranks):
            if place in held.digests:
                share = 0 if holder.tensor_axis is None else held.tensor_rank
                peers.setdefault(share, {}).setdefault(held.digests[place], []).append(rank)
        for by_digest in peers.values():
            if len(by_digest) > 1:
                return _sentence(", ".join(w.name for w in holder.weights), list(by_digest.values()), ranks)
    return None


def _sentence(weight: str, groups: list[list[int]], ranks: Sequence[Held]) -> str:
    most, all_ranks = max(groups, key=len), sorted(rank for group in groups for rank in group)
    others = sorted(set(all_ranks) - set(most))
    odd = others if len(most) > len(others) else all_ranks
    named = ", ".join(f"rank {rank} ({ranks[rank].role})" for rank in odd[:NAMED]) + ", …" * (len(odd) > NAMED)
    how = f"is not what {len(most)} other ranks hold" if odd is others else "should be the same on all of them and is not"
    return (
        f"replicas have come apart: {weight} on {named} {how}; go on from the last checkpoint with --resume auto; if it happens "
        f"again, the machine of {'that rank' if len(odd) == 1 else 'one of these ranks'} is suspect"
    )
