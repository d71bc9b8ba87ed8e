"""How ranks share a stage's layers: tensor and sequence parallelism around what Megatron's layers do inside.

Between layers every rank has the whole state, or with sequence parallelism its own stretch of positions: [S / T, B, d].
Nothing here computes anything with one rank. T ranks, S positions, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from loopscale.objective.cross_entropy import VocabularyShare
from loopscale.parallel.mesh import Place


@dataclass(frozen=True)
class Sharing:
    """Rank ``rank`` of ``size`` that share layers; ``by_position``: whether positions are divided between layers."""

    rank: int
    size: int
    by_position: bool

    @classmethod
    def at(cls, place: Place) -> Sharing:
        return cls(place.tensor_rank, place.tensor_size, place.sequence_parallel)

    def own_positions(self, length: int) -> slice:
        """The positions of a sequence of ``length`` that lie here between layers."""
        if not self.by_position:
            return slice(0, length)
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def enter(self, x: Tensor) -> Tensor:
        """``x`` [S here, B, ...] as every rank needs it for its share of a product: all positions. Its gradient is the sum of
        what the ranks' products send back."""
        if self.by_position:
            return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        return mappings.copy_to_tensor_model_parallel_region(x) if self.size > 1 else x

    def whole(self, x: Tensor) -> Tensor:
        """``x`` [S here, ...] of all positions, for what every rank then computes alike."""
        return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False) if self.by_position else x

    def total(self, x: Tensor) -> Tensor:
        """``x``, a sum over the positions here, summed over all positions."""
        return mappings.reduce_from_tensor_model_parallel_region(x) if self.by_position else x

    def vocabulary(self, rows: int, size: int) -> VocabularyShare | None:
        """This rank's ``rows`` of a head with ``size`` real rows; None where it has them all."""
        if self.size == 1 and rows == size:
            return None
        return VocabularyShare(first=self.rank * rows, size=size, reduce=self._reduce)

    def _reduce(self, values: Tensor, how: Literal["max", "sum"]) -> None:
        if self.size > 1:
            operation = dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM
            dist.all_reduce(values, operation, group=parallel_state.get_tensor_model_parallel_group())
