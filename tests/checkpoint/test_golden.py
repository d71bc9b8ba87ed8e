"""Checkpoints of every format that was ever released are read, or refused by the number of their format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from loopscale.checkpoint import store
from loopscale.checkpoint.restore import restore
from loopscale.errors import CheckpointError
from loopscale.inference.load import LoopedModel
from loopscale.train.snapshot import State
from tests.checkpoint.golden.make import TOKENS

GOLDEN = Path(__file__).parent / "golden"


def test_the_golden_checkpoint_of_format_2_gives_its_logits(mesh):
    model = LoopedModel(restore(GOLDEN / "step-2"))
    for depth, expected in json.loads((GOLDEN / "logits.json").read_text()).items():
        torch.testing.assert_close(model(TOKENS, depth=int(depth)).logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert model.tokenizer.encode("a b e").ids == [1, 2, 5]


def test_the_golden_checkpoint_has_moments_and_counters(mesh):
    store.verify(GOLDEN / "step-2")
    tensors = store.load_whole(GOLDEN / "step-2")
    names = {name.partition("/")[2] for name in tensors}
    assert tensors.keys() == {f"{kind}/{name}" for kind in ("weight", "exp_avg", "exp_avg_sq") for name in names}
    assert all((value >= 0).all() for name, value in tensors.items() if name.startswith("exp_avg_sq/"))
    state = State.of(GOLDEN / "step-2")
    assert (state.step, state.consumed, state.applied_steps, state.global_batch) == (2, 8, 2, 4)


@pytest.mark.parametrize(("version", "other"), [(1, "older"), (3, "newer")])
def test_another_format_is_one_sentence(mesh, tmp_path, version, other):
    checkpoint = tmp_path / "step-2"
    shutil.copytree(GOLDEN / "step-2", checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format": version}))
    with pytest.raises(CheckpointError) as raised:
        restore(checkpoint)
    told = f"checkpoint step-2 has format {version}; this version of loopscale reads 2: use a {other} one"
    assert str(raised.value) == told
