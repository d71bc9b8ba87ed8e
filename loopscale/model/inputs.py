"""A microbatch as the model sees it.

B sequences, S positions, n documents over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from loopscale.corpus.batches import Microbatch


@dataclass(frozen=True)
class Documents:
    """Where documents begin, for attention that stays within them.

    ``boundaries`` int32 [n + 1]: cumulative lengths over the B * S tokens, sequence after sequence; every sequence
    begins a document.
    """

    boundaries: Tensor
    batch: int
    length: int

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device) -> Documents:
        """Every sequence is one document."""
        return cls(torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device), batch, length)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Numbers of the sequences that hold one document, and of those that hold several; int64."""
        starts = self.boundaries[:-1].long()
        several = torch.zeros(self.batch, dtype=torch.bool, device=starts.device)
        several[starts[starts % self.length != 0] // self.length] = True
        return (~several).nonzero().squeeze(1), several.nonzero().squeeze(1)

    @cached_property
    def mask(self) -> Tensor:
        """What is added to the scores of the sequences that hold several documents: 0 or −inf, [rows, 1, S, S]."""
        begins = torch.zeros(self.batch * self.length, dtype=torch.int64, device=self.boundaries.device)
        begins[self.boundaries[:-1].long()] = 1
        document = begins.view(self.batch, self.length)[self.rows[1]].cumsum(1)
        seen = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))

    def select(self, kept: Tensor) -> Documents:
        """Those of the sequences that bool [B] names, in their order."""
        starts = self.boundaries[:-1].long()
        rows, number = starts // self.length, kept.cumsum(0) - 1
        own, batch = kept[rows], int(kept.sum())
        begins = number[rows[own]] * self.length + starts[own] % self.length
        return Documents(torch.cat((begins, begins.new_tensor([batch * self.length]))).to(torch.int32), batch, self.length)

    def forget_mask(self) -> None:
        """Frees the mask, S² numbers a row; it is made again where it is asked for."""
        vars(self).pop("mask", None)


@dataclass(frozen=True)
class Inputs:
    """Tokens of a microbatch and what its computation is keyed by."""

    tokens: Tensor
    """int64 [B, S]."""
    targets: Tensor
    """int64 [B, S], -100 where nothing is scored."""
    documents: Documents
    samples: Tensor
    """int64 [B], global sample numbers: they key the noise of the initial state."""
    step: int = 0
    """Optimizer step, another key of that noise."""
    purpose: str = "state"
    """What the noise is for: training ("state") and evaluation draw from different streams, and only training drops out."""
    final_visit: int = 1
    """From this visit on a readout that treats the last visit apart does so."""
    first_visits: Tensor | None = None
    """int64 [B]: the visit at which each sequence begins to move (per-sequence depth); unset: the first."""

    @property
    def training(self) -> bool:
        return self.purpose == "state"

    def select(self, kept: Tensor) -> Inputs:
        """Those of the sequences that bool [B] names, each computed as it is among all."""
        return replace(
            self,
            tokens=self.tokens[kept],
            targets=self.targets[kept],
            documents=self.documents.select(kept),
            samples=self.samples[kept],
            first_visits=None if self.first_visits is None else self.first_visits[kept],
        )

    @classmethod
    def of(
        cls, microbatch: Microbatch, device: torch.device, *, final_visit: int, step: int = 0, purpose: str = "state",
        first_visits: Tensor | None = None,
    ) -> Inputs:  # fmt: skip
        """A microbatch of the corpus, on ``device``."""
        there, (batch, length) = microbatch.to(device), microbatch.targets.shape
        return cls(
            there.inputs,
            there.targets,
            Documents(there.cu_seqlens, batch, length),
            there.samples,
            step,
            purpose,
            final_visit,
            None if first_visits is None else first_visits.to(device),
        )
