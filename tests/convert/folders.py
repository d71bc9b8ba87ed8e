"""Checkpoints of toy models, and what conversion makes of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import Piece
from loopscale.config import Config
from loopscale.convert.run import export
from loopscale.corpus.progress import Silent
from loopscale.train.folder import config_text
from tests.checkpoint.golden.make import tokenizer
from tests.convert.toys import config, weights


def checkpoint(folder: Path, of: Config, own: dict[str, Tensor]) -> Path:
    """A checkpoint of ours with the weights ``own``."""
    folder.mkdir(parents=True)
    tokenizer(str(folder / "letters.json"))
    files = {"config.yaml": config_text(of), "tokenizer.json": (folder / "letters.json").read_bytes()}
    pieces = [Piece(f"weight/{n}", tuple(t.shape), (0,) * t.dim(), t) for n, t in own.items()]
    store.save(Folder(folder), store.Snapshot(3, pieces, {"step": 3}, files))
    return folder / "step-3"


def toy(folder: Path, name: str, **changes) -> Path:
    of = config(name, **changes)
    return checkpoint(folder / "ours", of, weights(of, spread=0.12))


def exported(folder: Path, name: str, shard_bytes: int = 2**30, **changes) -> Path:
    """A toy in a format of others'."""
    export(toy(folder, name, **changes), name, folder / "theirs", Silent(), shard_bytes=shard_bytes)
    return folder / "theirs"


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    return store.load_whole(checkpoint)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(t.view(torch.int32), b[n].view(torch.int32)) for n, t in a.items())
