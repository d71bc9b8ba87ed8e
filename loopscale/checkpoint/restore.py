"""A model out of a checkpoint, to be used rather than trained on."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import MANIFEST, Folder, Storage, step_of, storage_at
from loopscale.checkpoint.parts import Piece, read_index
from loopscale.config import Config, from_values, load
from loopscale.config.tree import ParallelConfig
from loopscale.errors import CheckpointError, ConfigError, Problem, UsageError
from loopscale.model.stage import LoopedStage
from loopscale.model.weights import Holder, holders
from loopscale.parallel import mesh as meshes
from loopscale.parallel.mesh import Mesh

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint's model, fp32, without gradients."""

    checkpoint: str
    """Its name."""
    run_folder: Path | None
    """The run it belongs to, if it lies in one."""
    config: Config
    stage: LoopedStage
    mesh: Mesh
    tokenizer: Tokenizer
    end_of_text: int
    """Id of the token that ends a document."""
    notes: tuple[str, ...]
    """A sentence for each newer checkpoint that is damaged."""


def restore(where: str | Path) -> Restored:
    """The checkpoint at ``where``, or the newest whole one of the run there; ``where`` may be a URL that fsspec knows.

    Raises :class:`UsageError` when there is none, :class:`CheckpointError` when it is damaged.
    """
    from loopscale.corpus.tokenizer import end_of_text, load_tokenizer

    with tempfile.TemporaryDirectory(prefix="loopscale-") as cache:
        checkpoint, notes = find(where, Path(cache))
        config = config_of(checkpoint).model_copy(update={"parallel": ParallelConfig()})  # one rank holds what many trained
        mesh = meshes.start(config.parallel)
        stage = LoopedStage(
            config.model, config.corpus.sequence_length, seed=config.run.seed, device=mesh.device, initialise=False
        )
        load_weights(checkpoint, stage)
        store.compare_digests(checkpoint, _weights(stage), add=lambda own: own)  # each rank has the whole model
        tokenizer = load_tokenizer(checkpoint / "tokenizer.json")
        end = end_of_text(tokenizer, checkpoint / "tokenizer.json")
    run, stage = run_of(Path(where), checkpoint), stage.requires_grad_(False)
    return Restored(checkpoint.name, run, config, stage, mesh, tokenizer, end, tuple(notes))


def config_of(checkpoint: Path) -> Config:
    """Its configuration, which asks for no larger model than its tensors are: it comes with the checkpoint, so it is believed
    before memory is taken only where they agree."""
    source = f"config.yaml of {checkpoint.name}"
    config = from_values(Config, store.load_config(checkpoint), source).config
    model, index = config.model, read_index(checkpoint)
    if model.vocab_size is None:
        raise ConfigError(source, [Problem("model.vocab_size", "must be given")])
    if (layers := model.prelude_layers + model.core_layers + model.coda_layers) > len(index):
        raise CheckpointError(
            f"checkpoint {checkpoint.name} does not fit the model: it has {len(index)} tensors, the model {layers} layers"
        )
    table = holders(model, config.corpus.sequence_length)
    store.require_shapes(checkpoint, {f"weight/{w.name}": w.shape for holder in table for w in holder.weights})
    return config


def run_of(where: Path, checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint, found at ``where``, belongs to, if it lies in one."""
    if (where / "config.yaml").is_file() and not (where / "state.json").is_file():
        return where
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def load_weights(checkpoint: Path, stage: LoopedStage) -> None:
    """Sets the stage's weights from a verified checkpoint, strictly."""
    store.load(checkpoint, _weights(stage), {f"weight/{w.name}" for holder in stage.table for w in holder.weights})


def _weights(stage: LoopedStage) -> list[Piece]:
    return [p for holder, parameter in stage.held() for p in pieces(stage, "weight", holder, 0, parameter.detach().view(-1))]


def pieces(stage: LoopedStage, kind: str, holder: Holder, first: int, flat: Tensor) -> Iterator[Piece]:
    """What ``flat`` is of the global tensors of ``kind``: the parameter of ``holder`` here, or a moment of it, from its element
    ``first`` on."""
    for box in stage.boxes(holder, first, first + len(flat)):
        here = flat[box.start - first :][: math.prod(box.sizes)]
        yield Piece(f"{kind}/{box.weight.name}", box.weight.shape, box.offsets, here.view(box.sizes))


def find(where: str | Path, cache: Path, group: dist.ProcessGroup | None = None) -> tuple[Path, list[str]]:
    """The checkpoint at ``where``, or the newest whole one of the run there, verified, as a folder, and a sentence for each one
    passed over. One that lies behind a URL is copied to ``cache``, which all ranks see. A collective of ``group``.

    Raises :class:`UsageError` when there is none."""
    text, path = str(where).rstrip("/"), Path(where)
    if "://" in text:
        parent, _, name = text.rpartition("/")
        if (step := step_of(name)) is not None:
            checkpoint = meshes.on_main(lambda: storage_at(parent).fetch(step, cache), group)
            store.verify(checkpoint, group)
            return checkpoint, []
        storage = storage_at(text)
    elif (path / MANIFEST).is_file() and (path / "state.json").is_file():
        store.verify(path, group)
        return path.resolve(), []  # by its own name: it may be called best
    else:
        storage = storage_of(path)
    newest, passed_over = store.newest_whole(storage, "fall_back", cache, group)
    if newest is not None:
        return newest, [f"{sentence}; {newest.name} is taken" for sentence in passed_over]
    if passed_over or "://" in text or (path / "config.yaml").is_file():
        raise UsageError(f"{where} has no whole checkpoint in {storage.where}" + "".join(f"; {s}" for s in passed_over))
    raise UsageError(f"{where} is neither a run folder nor a checkpoint (runs/NAME or runs/NAME/checkpoints/step-N)")


def storage_of(run: Path, folder: str | None = None) -> Storage:
    """Where the run in the folder ``run`` has its checkpoints; ``folder`` is its ``checkpoint.folder``, or what its
    configuration there says."""
    if folder is None and (run / "config.yaml").is_file():
        folder = load(Config, run / "config.yaml").config.checkpoint.folder
    return Folder(run / "checkpoints") if folder is None else storage_at(f"{folder.rstrip('/')}/{run.name}")
