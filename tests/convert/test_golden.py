"""Folders that earlier versions exported are read to the bit; what this one cannot know is refused by its name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import loopscale
from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import Piece, read_index
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError
from tests.checkpoint.golden.make import HERE as CHECKPOINTS
from tests.convert.folders import toy, weights_in
from tests.convert.golden.make import HERE, TOKENS

EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_golden_export_has_every_bit_of_its_weights_and_its_logits(mesh, tmp_path, name):
    import_(HERE / name, None, tmp_path / "back", Silent())
    assert {weight: tensor.digest for weight, tensor in read_index(tmp_path / "back").items()} == EXPECTED[name]["weights"]
    model = loopscale.load(tmp_path / "back")
    for depth, logits in EXPECTED[name]["logits"].items():
        torch.testing.assert_close(model(TOKENS, depth=int(depth)).logits, torch.tensor(logits), rtol=1e-5, atol=1e-5)
    assert model.tokenizer.encode("a b e").ids == [1, 2, 5]


def test_the_golden_checkpoint_is_exported_as_it_is(mesh, tmp_path):
    export(CHECKPOINTS / "step-2", "xllm", tmp_path / "theirs", Silent())
    import_(tmp_path / "theirs", None, tmp_path / "back", Silent())
    given = {n: t for n, t in weights_in(CHECKPOINTS / "step-2").items() if n.startswith("weight/")}
    back = weights_in(tmp_path / "back")
    assert back.keys() == given.keys() and all(torch.equal(back[n], t) for n, t in given.items())


def test_what_a_later_version_exported_is_one_sentence(mesh, tmp_path):
    shutil.copytree(HERE / "hf", tmp_path / "theirs")
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**about, "format_version": 2}))
    with pytest.raises(CheckpointError) as raised:
        import_(tmp_path / "theirs", None, tmp_path / "back", Silent())
    assert str(raised.value) == "config.json: format_version is 2; this version of loopscale reads 1: use a newer one"


def test_state_that_a_backend_left_among_the_weights_is_one_sentence(mesh, tmp_path):
    """As Transformer Engine's layers have it: no tensor is passed over but by a format's own list."""
    there, extra = tmp_path / "theirs", "model.layers.0.self_attn._extra_state"
    shutil.copytree(HERE / "ouro", there)
    save_file({**load_file(there / "model.safetensors"), extra: torch.zeros(4)}, there / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        import_(there, None, tmp_path / "back", Silent())
    sentence = f"{there} does not hold what its config.json says: {extra} is unknown; correct the one or the other"
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda own: own | {"weight/core.0._extra_state": torch.zeros(4)}, "weight/core.0._extra_state is not in the model"),
        (lambda own: {n: t for n, t in own.items() if n != "weight/core.0.q"}, "weight/core.0.q is missing"),
        (lambda own: own | {"weight/core.0.q": torch.zeros(3, 8)}, r"weight/core.0.q has shape [3, 8], the model [48, 48]"),
    ],
    ids=["foreign", "missing", "shape"],
)
def test_a_checkpoint_that_is_not_its_configurations_is_not_exported(mesh, tmp_path, change, found):
    given = toy(tmp_path, "ouro")
    files = {name: (given / name).read_bytes() for name in ("config.yaml", "tokenizer.json")}
    pieces = [Piece(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in change(weights_in(given)).items()]
    store.save(Folder(tmp_path / "other"), store.Snapshot(4, pieces, {"step": 4}, files))
    with pytest.raises(CheckpointError) as raised:
        export(tmp_path / "other" / "step-4", "ouro", tmp_path / "theirs", Silent())
    place = tmp_path / "other" / "step-4"
    remedy = "use the configuration that it was saved with, or a checkpoint that no other program has changed"
    assert str(raised.value) == f"checkpoint {place} does not fit the model: {found}; {remedy}"
    assert not (tmp_path / "theirs").exists()
