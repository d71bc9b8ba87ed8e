"""A model is exported alike whichever ranks saved it: no row of their padding, no part of theirs is in what is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import loopscale
from loopscale.checkpoint import restore, store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import read_index
from loopscale.checkpoint.restore import config_of
from loopscale.cli import main
from loopscale.config import Config
from loopscale.config.tree import ParallelConfig
from loopscale.convert.formats import FORMATS
from loopscale.convert.formats.base import Format
from loopscale.convert.formats.hf import Hf
from loopscale.convert.run import export, import_
from loopscale.convert.tensors import Shards
from loopscale.corpus.progress import Silent
from loopscale.evaluate.perplexity import loss_by_depth
from loopscale.model.flops import count
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.ring import Ring
from loopscale.model.stage import LoopedStage
from loopscale.parallel.mesh import Mesh, sum_over_ranks
from tests.convert.folders import same, toy, weights_in
from tests.convert.toys import LENGTH, MODELS, VOCABULARY

pytestmark = pytest.mark.ranks

LAYOUTS = {"one": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "TP2xPP2": (2, 2)}
"""Tensor-parallel ranks and stages."""
DEPTHS = (1, 3, 5)  # below, at and above the depth of the toys
PADDED = {"parcae": 128}
"""Rows that a format's own config.json pads a vocabulary of 101 to."""
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def saved_again(mesh: Mesh, sources: Mapping[str, Path], root: Path, tensor: int, stages: int) -> dict[str, dict[int, float]]:
    """Each of ``sources`` loaded by these ranks, evaluated, and saved to ``root`` by all of them; the losses by depth."""
    found = {}
    for name, source in sources.items():
        config = config_of(source).model_copy(update={"parallel": ParallelConfig(tensor=tensor, pipeline=stages)})
        ring = Ring.of(config, count(config.model, LENGTH))
        place = mesh.place(ring.slices)
        stage = LoopedStage(config.model, LENGTH, seed=config.run.seed, place=place, initialise=False).requires_grad_(False)
        restore.load_weights(source, stage)
        found[name] = evaluated(mesh, config, ring, stage)
        own = [(h, p) for h, p in stage.held() if h.tensor_axis is not None or mesh.tensor_rank == 0]
        pieces = [x for h, p in own for x in restore.pieces(stage, "weight", h, 0, p.detach().view(-1))]
        files = {file: (source / file).read_bytes() for file in ("config.yaml", "tokenizer.json")}
        store.save(Folder(root / name), store.Snapshot(3, pieces, {"step": 3}, files))
    return found


def evaluated(mesh: Mesh, config: Config, ring: Ring, stage: LoopedStage) -> dict[int, float]:
    documents, rows = Documents.whole(*TOKENS.shape, mesh.device), torch.arange(len(TOKENS))
    inputs = Inputs(TOKENS, TOKENS.roll(-1, 1), documents, rows, purpose="evaluation", final_visit=3)
    return loss_by_depth(stage, ring, mesh, [inputs], DEPTHS, sum_over_ranks)[0]


@pytest.fixture(scope="module")
def saved(mesh, ranks, tmp_path_factory):
    """By layout and design: the checkpoint of the same random weights, four key/value heads for four ranks, and its losses."""
    root = tmp_path_factory.mktemp("layouts")
    sources = {name: toy(root / "given" / name, name, kv_heads=None if name in ("parcae", "huginn") else 4) for name in MODELS}
    found = {}
    for layout, (tensor, stages) in LAYOUTS.items():
        parallel = ParallelConfig(tensor=tensor, pipeline=stages)
        losses = ranks.run(saved_again, tensor * stages, sources, root / layout, tensor, stages, parallel=parallel)[0]
        for name in MODELS:
            found[layout, name] = (root / layout / name / "step-3", losses[name])
    return found


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", MODELS)
def test_101_tokens_are_101_rows_of_the_export_whichever_ranks_saved_it(saved, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Hf, "logits", Format.logits)  # those are compared below
    for layout, (tensor, stages) in LAYOUTS.items():
        checkpoint, losses = saved[layout, name]
        parts = {box.file for tensor in read_index(checkpoint).values() for box in tensor.boxes}
        assert len(parts) == tensor * stages  # it was saved by all of them
        assert losses == pytest.approx(saved["one", name][1], rel=1e-5), layout
        export(checkpoint, name, tmp_path / layout, Silent())
        assert contents(tmp_path / layout) == contents(tmp_path / "one"), layout
    written, about = Shards(tmp_path / "TP4"), json.loads((tmp_path / "TP4" / "config.json").read_text())
    rows = PADDED.get(name, VOCABULARY)
    rules = FORMATS[name].rules(config_of(checkpoint), about)
    vocabularies = [rule.theirs for rule in rules if rule.parts[0].weight.shape[0] == VOCABULARY]
    assert vocabularies and all(written.shape(theirs)[0] == rows for theirs in vocabularies)
    assert about.get("padded_vocab_size", VOCABULARY) == rows and about.get("model", about)["vocab_size"] == VOCABULARY
    import_(tmp_path / "TP4", None, tmp_path / "back", Silent())
    assert same(weights_in(tmp_path / "back"), weights_in(saved["one", name][0]))


@pytest.mark.parametrize("name", MODELS)
def test_what_four_ranks_saved_is_the_same_model_in_transformers(saved, tmp_path, name):
    checkpoint, _ = saved["TP2xPP2", name]
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "hf"]) == 0
    given = loopscale.load(saved["one", name][0])
    found = Hf().logits(tmp_path / "out", TOKENS[:1], DEPTHS)  # by a process that cannot import loopscale
    for logits, depth in zip(found, DEPTHS, strict=True):
        expected = given(TOKENS[:1], depth=depth).logits[0]
        assert float((logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), depth
