"""What a run saves of itself and how it goes on from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.parts import Piece, read_index
from loopscale.checkpoint.restore import pieces
from loopscale.config import Config
from loopscale.config.show import FIXED, QUIET, differences
from loopscale.errors import CheckpointError, UsageError
from loopscale.model.stage import LoopedStage
from loopscale.model.weights import Holder
from loopscale.parallel.mesh import Mesh, sum_over_ranks
from loopscale.parallel.zero import ZeroOptimizer
from loopscale.train.spikes import StepLosses

Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]


@dataclass
class Progress:
    """What a run counts; saved in every checkpoint."""

    step: Count = 0
    """Optimizer steps done, skipped ones included."""
    consumed: Count = 0
    """Global samples read."""
    tokens: Count = 0
    """Scored tokens trained on."""
    skipped: Count = 0
    """Steps whose update was dropped, those included that the run then went back from."""
    bad_in_a_row: Count = 0
    """Of these, the last ones with no good step between them; steps that are done again do not count as good."""
    went_back_from: Count = 0
    """The last step behind which the run went back to a checkpoint."""
    losses: list[StepLosses] = field(default_factory=list)
    """Of the last good steps, as far back as loss spikes are judged by them."""
    elapsed: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    """Seconds, those before a resume included."""
    run_id: str = ""
    """Names the run to its tracker."""


@dataclass(kw_only=True)
class State(Progress):
    """What ``state.json`` holds."""

    applied_steps: Count
    """By the optimizer."""
    law: dict[str, Any]
    """Of the depth controller."""
    corpus: str
    """Fingerprint."""
    global_batch: Annotated[Count, Field(ge=1)]

    @classmethod
    def of(cls, checkpoint: Path) -> State:
        """That of a verified checkpoint; raises :class:`CheckpointError` that names what is missing or cannot be."""
        content, damaged = store.load_state(checkpoint), f"checkpoint {checkpoint.name} is damaged: state.json"
        if missing := [f.name for f in fields(cls) if f.name not in content]:
            raise CheckpointError(f"{damaged} does not have {missing[0]}")
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise CheckpointError(f"{damaged} has {first['loc'][0]} {first['input']!r:.60}: {first['msg'].lower()}") from None

    def progress(self) -> Progress:
        return Progress(**{f.name: getattr(self, f.name) for f in fields(Progress)})


Fragment = tuple[str, Holder, int, Tensor]
"""Kind, parameter, and what a rank has of it from an element on, flat."""


def held(stage: LoopedStage, optimizer: ZeroOptimizer) -> Iterator[Fragment]:
    """All weights and moments that lie here."""
    for holder, parameter in stage.held():
        yield "weight", holder, 0, parameter.detach().view(-1)
    holders = {h.parameter: h for h, _ in stage.held()}
    for moment, name, first, flat in optimizer.moments():
        yield moment, holders[name], first, flat


def own(stage: LoopedStage, optimizer: ZeroOptimizer, mesh: Mesh) -> list[Piece]:
    """What this rank saves: of what several ranks have alike, each a part."""
    fragments = [f for f in held(stage, optimizer) if f[1].tensor_axis is not None or mesh.tensor_rank == 0]
    alike = [f for f in fragments if f[0] == "weight" or not optimizer.divides_moments]
    divided = [f for f in fragments if f[0] != "weight" and optimizer.divides_moments]
    return _pieces(stage, [*_part(alike, mesh.data_rank, mesh.data_size), *divided])


def _part(fragments: Sequence[Fragment], rank: int, size: int) -> Iterator[Fragment]:
    """The part of rank ``rank`` of ``size``, when all is laid end to end and cut into equal lengths."""
    total, at = sum(len(flat) for *_, flat in fragments), 0
    begin, end = total * rank // size, total * (rank + 1) // size
    for kind, holder, first, flat in fragments:
        lo, hi = max(begin - at, 0), min(end - at, len(flat))
        if lo < hi:
            yield kind, holder, first + lo, flat[lo:hi]
        at += len(flat)


def _pieces(stage: LoopedStage, fragments: Iterable[Fragment]) -> list[Piece]:
    return [piece for fragment in fragments for piece in pieces(stage, *fragment)]


def restore(
    checkpoint: Path, stage: LoopedStage, optimizer: ZeroOptimizer, mesh: Mesh, group: dist.ProcessGroup | None = None
) -> State:
    """Sets weights and moments from a verified checkpoint, strictly, and returns its ``state.json``. A collective."""
    state, moments = State.of(checkpoint), optimizer.moment_names()
    stored = {name.split("/")[0] for name in read_index(checkpoint)}
    if missing := [moment for moment in moments if moment not in stored]:
        raise UsageError(
            f"{checkpoint} has no {' and no '.join(missing)}, which the optimizer of this run goes on from; a new run can start "
            f"from its weights, with --init {checkpoint}"
        )
    names = {f"{k}/{w.name}" for k in ("weight", *moments) for h in stage.table for w in h.weights}
    store.load(checkpoint, _pieces(stage, held(stage, optimizer)), names)
    optimizer.begin_at(state.applied_steps)
    store.compare_digests(checkpoint, own(stage, optimizer, mesh), partial(sum_over_ranks, group=group))
    return state


def changes(checkpoint: Path, config: Config, fingerprint: str, global_batch: int) -> list[str]:
    """What differs from the run that wrote ``checkpoint``, one sentence each.

    Raises :class:`UsageError` when something differs that a run must keep to be the same run.
    """
    state = State.of(checkpoint)
    if state.corpus != fingerprint and not config.corpus.accept_change:
        raise UsageError(
            f"{checkpoint} was trained on corpus {state.corpus[:12]}…, corpus.path {config.corpus.path} is "
            f"{fingerprint[:12]}…; name the right one, or set corpus.accept_change=true"
        )
    differing = differences(store.load_config(checkpoint), config.model_dump(mode="json"))
    found = [d for d in differing if d[0] != "batch.global_batch"]  # what counts is the settled size
    kept = [f"{key} {old}, the configuration says {new}" for key, old, new in found if key.startswith(FIXED)]
    if kept:
        raise UsageError(f"{checkpoint} was trained with {'; '.join(kept[:4])}; a resumed run keeps it")
    told = [f"{key} was {old}, is now {new}" for key, old, new in found if not key.startswith(QUIET)]
    if state.global_batch != global_batch:
        step, steps, consumed = state.step, config.train.steps, state.consumed
        whole = consumed + (steps - step) * global_batch
        told.append(
            f"batch.global_batch was {state.global_batch}, is now {global_batch}: step {step + 1} reads on from sample "
            f"{consumed}, and the {steps} steps will have read {whole} samples instead of {steps * state.global_batch}"
        )
    return told
