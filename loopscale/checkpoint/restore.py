"""A model out of a checkpoint, to be used rather than trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopscale.checkpoint import commit, store
from loopscale.config import Config, load
from loopscale.config.tree import ParallelConfig
from loopscale.errors import UsageError
from loopscale.model.stage import LoopedStage
from loopscale.model.weights import Holder
from loopscale.parallel import mesh as meshes
from loopscale.parallel.mesh import Mesh

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint's model, fp32, without gradients."""

    checkpoint: Path
    config: Config
    stage: LoopedStage
    mesh: Mesh

    @property
    def run_folder(self) -> Path | None:
        """The run it belongs to, if it lies in one."""
        parent = self.checkpoint.parent
        return parent.parent if parent.name == "checkpoints" else None

    def tokenizer(self) -> tuple[Tokenizer, int]:
        """The tokenizer and the id of the token that ends a document."""
        from loopscale.corpus.tokenizer import end_of_text, load_tokenizer

        path = self.checkpoint / "tokenizer.json"
        tokenizer = load_tokenizer(path)
        return tokenizer, end_of_text(tokenizer, path)


def restore(path: Path) -> Restored:
    """The checkpoint at ``path``, or the newest whole one of the run at ``path``.

    Raises :class:`UsageError` when there is none, :class:`CheckpointError` when it is damaged.
    """
    checkpoint = find(path)
    config = load(Config, checkpoint / "config.yaml").config
    config = config.model_copy(update={"parallel": ParallelConfig()})  # whatever layout it was trained at, one rank holds it
    mesh = meshes.start(config.parallel)
    stage = LoopedStage(config.model, config.corpus.sequence_length, seed=config.run.seed, device=mesh.device, initialise=False)
    load_weights(checkpoint, stage)
    return Restored(checkpoint, config, stage.requires_grad_(False), mesh)


def load_weights(checkpoint: Path, stage: LoopedStage) -> None:
    """Sets the stage's weights from a checkpoint, strictly."""
    set_weights(stage, load_own(checkpoint, stage, {"weight": [h for h, _ in stage.held()]}))


def load_own(checkpoint: Path, stage: LoopedStage, kinds: Mapping[str, Sequence[Holder]]) -> dict[str, Tensor]:
    """The global tensors named ``kind/global.name`` of the given parameters of ``stage``; those of other stages may be there."""
    wanted = {f"{kind}/{w.name}": w.shape for kind, own in kinds.items() for h in own for w in h.weights}
    elsewhere = {f"{kind}/{w.name}" for kind in kinds for h in stage.table for w in h.weights} - wanted.keys()
    return store.load_tensors(checkpoint, wanted, elsewhere)


@torch.no_grad()
def set_weights(stage: LoopedStage, loaded: Mapping[str, Tensor]) -> None:
    """Sets the stage's weights from tensors named ``weight/global.name``."""
    for holder, parameter in stage.held():
        parameter.copy_(stage.share(holder, {w.name: loaded[f"weight/{w.name}"] for w in holder.weights}))


def find(path: Path) -> Path:
    """The checkpoint at ``path``, or the newest whole one of the run there; raises :class:`UsageError` when there is none."""
    if (path / commit.MANIFEST).is_file() and (path / "state.json").is_file():
        commit.verify(path)
        return path
    if (path / "checkpoints").is_dir():
        checkpoint, passed_over = store.newest_whole(path / "checkpoints", "fall_back")
        if checkpoint is not None:
            return checkpoint
        raise UsageError(f"{path} has no whole checkpoint yet" + "".join(f"; {s}" for s in passed_over))
    raise UsageError(f"{path} is neither a run folder nor a checkpoint (runs/NAME or runs/NAME/checkpoints/step-N)")
