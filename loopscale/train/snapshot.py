"""What a run saves of itself and how it goes on from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.restore import load_own, set_weights
from loopscale.config import Config
from loopscale.config.show import differences
from loopscale.errors import CheckpointError
from loopscale.model.stage import LoopedStage
from loopscale.parallel.mesh import gather_shares
from loopscale.parallel.zero import ZeroOptimizer
from loopscale.train import folder as folders
from loopscale.train.spikes import StepLosses


@dataclass
class Progress:
    """What a run counts; saved in every checkpoint."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed: int = 0
    """Global samples read."""
    tokens: int = 0
    """Scored tokens trained on."""
    skipped: int = 0
    """Steps whose update was dropped, those included that the run then went back from."""
    bad_in_a_row: int = 0
    """Of these, the last ones with no good step between them; steps that are done again do not count as good."""
    went_back_from: int = 0
    """The last step behind which the run went back to a checkpoint."""
    losses: list[StepLosses] = field(default_factory=list)
    """Of the last good steps, as far back as loss spikes are judged by them."""
    elapsed: float = 0.0
    """Seconds, those before a resume included."""
    run_id: str = ""
    """Names the run to its tracker."""


def tensors(stage: LoopedStage, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Weights and moments that this stage holds as ``kind/global.name``, whole. A collective."""
    moments, named = optimizer.moments(), dict[str, Tensor]()
    for holder, parameter in stage.held():
        held = {
            "weight": parameter.detach(),
            **{m: of[holder.parameter] for m, of in moments.items() if holder.parameter in of},
        }
        for kind, own in held.items():
            shares = gather_shares(own) if holder.tensor_axis is not None else [own]
            named.update({f"{kind}/{name}": whole for name, whole in holder.split(shares).items()})
    return named


def restore(checkpoint: Path, stage: LoopedStage, optimizer: ZeroOptimizer) -> Progress:
    """Sets weights, moments and counters from a checkpoint, strictly; returns the counters."""
    state = store.load_state(checkpoint)
    holders = {h.parameter: h for h, _ in stage.held()}
    kinds = {"weight": list(holders), **optimizer.moment_names()}
    loaded = load_own(checkpoint, stage, {kind: [holders[n] for n in names] for kind, names in kinds.items()})
    joined = {
        kind: {n: stage.share(holders[n], {w.name: loaded[f"{kind}/{w.name}"] for w in holders[n].weights}) for n in names}
        for kind, names in kinds.items()
    }
    set_weights(stage, loaded)
    optimizer.load(joined["weight"], joined, state["applied_steps"])
    return Progress(**{f.name: state[f.name] for f in fields(Progress) if f.name in state})


def changes(checkpoint: Path, config: Config, fingerprint: str, global_batch: int) -> list[str]:
    """What differs from the run that wrote ``checkpoint``, one sentence each.

    Raises :class:`CheckpointError` when something differs that a run must keep to be the same run.
    """
    state = store.load_state(checkpoint)
    if state["corpus"] != fingerprint and not config.corpus.accept_change:
        raise CheckpointError(
            f"{checkpoint} was trained on corpus {state['corpus'][:12]}…, corpus.path {config.corpus.path} is "
            f"{fingerprint[:12]}…; name the right one, or set corpus.accept_change=true"
        )
    before = yaml.safe_load((checkpoint / "config.yaml").read_text())
    differing = differences(before, config.model_dump(mode="json"))
    found = [d for d in differing if d[0] != "batch.global_batch"]  # what counts is the settled size
    if state["global_batch"] != global_batch:
        found.append(("batch.global_batch", state["global_batch"], global_batch))
    kept = [f"{key} {old}, the configuration says {new}" for key, old, new in found if key.startswith(folders.FIXED)]
    if kept:
        raise CheckpointError(f"{checkpoint} was trained with {'; '.join(kept[:4])}; a resumed run keeps it")
    loud = [(key, old, new) for key, old, new in found if not key.startswith(folders.QUIET)]
    return [f"{key} was {old}, is now {new}" for key, old, new in loud]
