"""What was written, read back: its logits against those of what it was made of.

The weights of one layer are in memory at a time, so that a model is compared that does not fit there whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import proxy

import torch
from torch import Tensor, nn

from loopscale.config import Config
from loopscale.config.tree import ParallelConfig
from loopscale.errors import CheckpointError
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.stage import LoopedStage
from loopscale.model.weights import Holder
from loopscale.parallel import mesh as meshes

TOKENS = 32
"""Of the sequence that is compared, at most."""
VISITS = 2
"""That are compared, at most: the second begins where the first ended."""
TOLERANCE = 1e-4
"""Of logits of what is stored in fp32, as a share of the largest."""
BY_ANOTHER = 1e-3
"""The same, where other code than ours computes them."""
Read = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Weights by their global names."""


@dataclass(frozen=True)
class Check:
    """What was read back, against what it was made of."""

    tokens: int
    visits: int
    difference: float
    """The largest of any logit."""
    largest: float
    """Of the logits."""
    stored: torch.dtype
    by: str
    """Whose code read it."""

    def __str__(self) -> str:
        stored, visits = str(self.stored).removeprefix("torch."), " and ".join(str(r) for r in range(1, self.visits + 1))
        return (
            f"read back: logits of {self.tokens} random tokens at depth {visits}, computed in fp32 from {stored} by {self.by}, "
            f"differ by {self.difference:.1e} at most (they reach {self.largest:.1f})"
        )


class Different(CheckpointError):
    """What was written is not what it was made of."""


def same_by_their_code(ours: Tensor, theirs: Tensor) -> None:
    """Raises :class:`Different` where their code makes other logits of a folder of theirs than our model does."""
    difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= BY_ANOTHER * max(largest, 1.0):
        raise Different(
            f"what was written has other logits in transformers than in our model: they differ by {difference:.1e} and reach "
            f"{largest:.1f}; nothing of it is left"
        )


def compared(expected: Tensor, found: Tensor, stored: torch.dtype, by: str | None = None) -> Check:
    """Of logits as :func:`logits` gives them; ``by``: whose code read what was written, if not ours. Raises
    :class:`CheckpointError` where those of what is ``stored`` in fp32 differ by more than rounding does; what bf16 rounds away is
    told alone."""
    difference, largest = float((expected - found).abs().max()), float(expected.abs().max())
    check = Check(expected.shape[1], len(expected), difference, largest, stored, by or "our code")
    tolerance = TOLERANCE if by is None else BY_ANOTHER
    if stored == torch.float32 and not difference <= tolerance * max(largest, 1.0):
        raise Different(f"what was written is not what it was made of; this is a fault of loopscale, or of the disk; {check}")
    return check


def probe(config: Config) -> Tensor:
    """The sequence that is compared, int64 [1, S]."""
    length = min(TOKENS, config.corpus.sequence_length)
    return torch.randint(config.model.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(config: Config, read: Read) -> Tensor:
    """Of a sequence of random tokens after each of the first visits, [visits, S, V], fp32."""
    meshes.start(ParallelConfig())
    model, depth = config.model, min(VISITS, config.depth.evaluation_depth)
    tokens = probe(config)
    length = tokens.shape[1]
    stage = LoopedStage(model, config.corpus.sequence_length, seed=config.run.seed, initialise=False)
    _fill_on_demand(stage, read)
    documents, samples = Documents.whole(1, length, tokens.device), torch.zeros(1, dtype=torch.int64)
    inputs = Inputs(tokens, tokens, documents, samples, purpose="evaluation", final_visit=config.depth.evaluation_depth)
    feed, state, found = stage.prelude(inputs), None, []
    for r in range(1, depth + 1):
        state = stage.visit(inputs, feed, state, r)
        found.append(stage.logits(stage.decode(inputs, state, r))[:, 0])
    return torch.stack(found)


def _fill_on_demand(stage: LoopedStage, read: Read) -> None:
    """Fills what belongs to no layer. Layers are filled when they run, all of them in the same memory."""
    held, shared = stage.held(), dict[str, Tensor]()
    weak = cast(LoopedStage, proxy(stage))  # the stage holds the hooks: a cycle would keep it in memory
    for name in ("prelude_block", "core_block", "coda_block"):
        for number, layer in getattr(stage, name).layers.items():
            place = f"{name}.layers.{number}."
            own = [(h, p) for h, p in held if h.parameter.startswith(place)]
            for holder, parameter in own:
                parameter.data = shared.setdefault(holder.parameter.removeprefix(place), parameter.data)
            layer.register_forward_pre_hook(partial(_fill_layer, weak, own, read))
            held = [(h, p) for h, p in held if not h.parameter.startswith(place)]
    for holder, parameter in held:
        _fill(stage, holder, parameter, read)


def _fill_layer(stage: LoopedStage, own: Sequence[tuple[Holder, nn.Parameter]], read: Read, *_: Any) -> None:
    for holder, parameter in own:
        _fill(stage, holder, parameter, read)


def _fill(stage: LoopedStage, holder: Holder, parameter: Tensor, read: Read) -> None:
    stage.fill(holder, parameter, read([w.name for w in holder.weights]))
