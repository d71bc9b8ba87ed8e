"""Batch arithmetic: any two of global batch, microbatch and accumulation give the third.

A global batch is cut into depth groups of consecutive sequences; every group is striped over the data-parallel
ranks and cut into microbatches there. So dp x microbatch divides the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopscale.config.tree import BatchConfig
from loopscale.errors import ConfigError, Problem


@dataclass(frozen=True)
class Batch:
    """Settled sizes, in sequences."""

    global_batch: int
    microbatch: int
    accumulation: int
    groups: int
    data_parallel: int

    @property
    def group(self) -> int:
        """Sequences of one depth group, over all ranks."""
        return self.global_batch // self.groups

    @property
    def group_per_rank(self) -> int:
        return self.group // self.data_parallel

    @property
    def microbatches_per_group(self) -> int:
        """Microbatches of one depth group on one rank."""
        return self.group_per_rank // self.microbatch


def settle(batch: BatchConfig, groups: int, data_parallel: int) -> Batch:
    """The batch of a run on ``data_parallel`` replicas; raises :class:`ConfigError` with the arithmetic."""
    total, micro, accumulation = batch.global_batch, batch.microbatch, batch.accumulation
    dp = data_parallel
    if total is None and (micro is None or accumulation is None):
        raise _error("batch.global_batch", "must be given, or both batch.microbatch and batch.accumulation")
    if total is None:
        assert micro is not None and accumulation is not None
        total = micro * accumulation * dp
    elif micro is not None and accumulation is not None and micro * accumulation * dp != total:
        raise _error(
            "batch.global_batch",
            f"is {total}, but microbatch {micro} × accumulation {accumulation} × {dp} data-parallel ranks = "
            f"{micro * accumulation * dp}; leave one of the three out",
        )
    if total % groups:
        raise _error("depth.groups", f"{groups} groups do not divide the global batch of {total} sequences")
    group = total // groups
    if micro is None:
        accumulation = accumulation or groups
        if total % (accumulation * dp):
            raise _error(
                "batch.accumulation",
                f"{total} sequences cannot be cut into {accumulation} microbatches on each of {dp} data-parallel ranks",
            )
        micro = total // (accumulation * dp)
    if group % (dp * micro):
        raise _error(
            "batch.microbatch",
            f"{dp} data-parallel ranks × microbatch {micro} must divide the depth group of {group} sequences "
            f"(global batch {total} / {groups} groups)",
        )
    return Batch(total, micro, total // (micro * dp), groups, dp)


def _error(key: str, sentence: str) -> ConfigError:
    return ConfigError("batch", [Problem(key, sentence)])
