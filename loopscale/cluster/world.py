"""Where a task of a job stands: SLURM's variables in, torchrun's out. Imports nothing heavy: a task's first seconds count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from loopscale.errors import ClusterError

_PORTS = range(20_000, 32_000)
"""Below those that Linux hands out by itself."""


@dataclass(frozen=True)
class World:
    """One task of a job: a rank of ``nodes``, with ``devices`` ranks on each."""

    nodes: tuple[str, ...]
    devices: int
    node: int
    local_rank: int
    port: int

    @property
    def rank(self) -> int:
        return self.node * self.devices + self.local_rank

    @property
    def size(self) -> int:
        return len(self.nodes) * self.devices

    @property
    def host(self) -> str:
        return self.nodes[self.node]

    @classmethod
    def from_slurm(cls) -> World:
        """The task that SLURM started this process as. Raises :class:`ClusterError` where it was not started by srun, or its
        tasks are not spread evenly and in order over the nodes."""
        from submitit.slurm.slurm import SlurmJobEnvironment

        try:
            rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
            node, local_rank = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_LOCALID"])
            nodes = tuple(SlurmJobEnvironment().hostnames)
            job = int(os.environ["SLURM_JOB_ID"])
        except KeyError as error:
            raise ClusterError(
                f"{error.args[0]} is not set: this is no task of a SLURM job; start one per device by srun"
            ) from None
        devices = size // len(nodes)
        world = cls(nodes, devices, node, local_rank, _PORTS[2 * job % len(_PORTS)])
        if size != world.size or rank != world.rank:
            raise ClusterError(
                f"task {rank} of {size} is number {local_rank} on node {node} of {len(nodes)}; tasks must lie evenly and in "
                "order on the nodes (srun --distribution=block)"
            )
        return world

    def without(self, sick: Sequence[str], nodes: int) -> World | None:
        """The same task among the first ``nodes`` that are not ``sick``; None where its node is not one of them. Its port is
        another one: what was listening may still be closing."""
        chosen = tuple([n for n in self.nodes if n not in sick][:nodes])
        if self.host not in chosen:
            return None
        return World(chosen, self.devices, chosen.index(self.host), self.local_rank, self.port + 1)

    def variables(self) -> dict[str, str]:
        """What torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "MASTER_ADDR": self.nodes[0],
            "MASTER_PORT": str(self.port),
        }
