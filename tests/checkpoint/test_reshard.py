"""A checkpoint in other parts holds the same, appears whole or not at all, and is made in bounded memory."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from loopscale.checkpoint import inspect, store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import Piece, StoredTensor, read_index
from loopscale.checkpoint.reshard import _cut, reshard
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError, UsageError
from tests.checkpoint.sealed import changed

GOLDEN = Path(__file__).parent / "golden" / "step-2"


def parts_of(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / "tensors").glob("*.safetensors"))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_same_tensors_in_so_many_parts_of_nearly_equal_size(mesh, tmp_path, parts):
    out = tmp_path / "deep" / "out"
    reshard(GOLDEN, out, parts, Silent())
    assert inspect.compare(out, GOLDEN, Silent()).same
    elements = []
    for path in parts_of(out):
        with safe_open(path, "pt") as file:
            elements.append(sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys()))  # noqa: SIM118
    assert [p.name for p in parts_of(out)] == [f"rank-{k:05d}-000.safetensors" for k in range(parts)]
    assert max(elements) - min(elements) <= 8  # a row: half of one at each end
    boxes = [len(t.boxes) for t in read_index(out).values()]
    assert sum(boxes) <= len(boxes) + parts - 1
    for file in ("state.json", "config.yaml", "tokenizer.json"):
        assert (out / file).read_bytes() == (GOLDEN / file).read_bytes()
    assert json.loads((out / "manifest.json").read_text())["facts"] == json.loads((GOLDEN / "manifest.json").read_text())["facts"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_thousands_of_small_boxes_become_few_and_back(mesh, tmp_path):
    values = torch.randn(1500, 4)
    pieces = [
        Piece("weight/a", (1500, 4), (row, 2 * c), values[row : row + 1, 2 * c : 2 * c + 2])
        for row in range(1500)
        for c in (0, 1)
    ]
    store.save(Folder(tmp_path), store.Snapshot(1, pieces, {}, {"config.yaml": ""}))
    reshard(tmp_path / "step-1", tmp_path / "few", 2, Silent())
    (tensor,) = read_index(tmp_path / "few").values()
    assert [(b.file, b.offsets, b.sizes) for b in tensor.boxes] == [
        ("rank-00000-000.safetensors", (0, 0), (750, 4)),
        ("rank-00001-000.safetensors", (750, 0), (750, 4)),
    ]
    assert torch.equal(store.load_whole(tmp_path / "few")["weight/a"], values)


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 30)) | st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=6),
    parts=st.integers(1, 12),
    largest=st.integers(1, 40),
)
def test_cuts_tile_every_tensor_in_order_and_evenly(shapes, parts, largest):
    index = {f"weight/{i}": StoredTensor(shape=shape, digest="0" * 16, boxes=()) for i, shape in enumerate(shapes)}
    cuts = list(_cut(index, parts, largest))
    for name, tensor in index.items():
        row = 0
        for _, offsets, sizes, _ in (c for c in cuts if c[0] == name):
            assert offsets == (row, 0)[: len(sizes)] and sizes[1:] == tensor.shape[1:]
            assert math.prod(sizes) <= max(largest, math.prod(tensor.shape[1:]))
            row += sizes[0]
        assert row == tensor.shape[0]
    numbers = [part for *_, part in cuts]
    assert numbers == sorted(numbers)
    assert set(numbers) <= set(range(parts))
    total = sum(t.elements for t in index.values())
    widest = max(math.prod(t.shape[1:]) for t in index.values())
    for k in range(parts):
        assert abs(sum(math.prod(sizes) for _, _, sizes, part in cuts if part == k) - total / parts) <= widest


def test_weights_alone_are_served_but_no_run_goes_on_from_them(mesh, tmp_path):
    from loopscale.checkpoint.restore import restore
    from loopscale.inference.load import LoopedModel
    from loopscale.parallel.zero import ZeroOptimizer
    from loopscale.train import snapshot
    from tests.checkpoint.golden.make import TOKENS

    reshard(GOLDEN, tmp_path / "out", 2, Silent(), weights_only=True)
    assert {name.split("/")[0] for name in read_index(tmp_path / "out")} == {"weight"}
    restored = restore(tmp_path / "out")
    assert torch.equal(LoopedModel(restored)(TOKENS).logits, LoopedModel(restore(GOLDEN))(TOKENS).logits)
    stage, config = restored.stage.requires_grad_(True), restored.config
    optimizer = ZeroOptimizer(
        {h.parameter: p for h, p in stage.held()}, {h.parameter: h.weights[0].kind for h, _ in stage.held()}, config.optimizer, 0
    )
    with pytest.raises(UsageError, match=r"has no exp_avg and no exp_avg_sq, which the optimizer of this run .* --init "):
        snapshot.restore(tmp_path / "out", stage, optimizer, restored.mesh)


def test_what_cannot_be_is_refused_and_leaves_nothing(mesh, tmp_path):
    for arguments, sentence in (
        ((GOLDEN, 1), "already exists"),
        ((tmp_path / "out", 0), "--parts is 0, must be from 1 to 99999"),
        ((tmp_path / "out", 5000), "--parts is 5000, and the rows of the tensors fill .* of them; use fewer"),
    ):
        with pytest.raises(UsageError, match=sentence):
            reshard(GOLDEN, *arguments, Silent())
    with pytest.raises(UsageError, match="must be at least 16MiB"):
        reshard(GOLDEN, tmp_path / "out", 1, Silent(), memory=1000)
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        reshard(tmp_path, tmp_path / "out", 1, Silent())
    assert list(tmp_path.iterdir()) == []


def test_an_index_whose_digests_are_not_those_of_the_elements_is_not_passed_on(mesh, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "step-2")
    with changed(tmp_path / "step-2", "tensors/index.json") as index:
        index["weight/core.0.q"]["digest"] = "0" * 16
    with pytest.raises(CheckpointError, match=r"the elements of weight/core\.0\.q are not those that its digest was taken of"):
        reshard(tmp_path / "step-2", tmp_path / "out", 2, Silent())
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_disk_without_room_and_an_interrupt_leave_nothing(mesh, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CheckpointError, match="its disk has 0 MB free"):
            reshard(GOLDEN, tmp_path / "out", 2, Silent())

    class Interrupting(Silent):
        def update(self, phase, done, total):
            if phase == "writing" and done > total / 2:
                raise KeyboardInterrupt

    with pytest.raises(CheckpointError, match="could not be saved: rank 0: KeyboardInterrupt"):
        reshard(GOLDEN, tmp_path / "out", 2, Interrupting())
    assert list(tmp_path.iterdir()) == []


MEMORY = 2**26
PROBE = """
import sys
from pathlib import Path
import torch
from loopscale.checkpoint.reshard import reshard
from loopscale.corpus.progress import Silent
from loopscale.diagnostics.memory import PeakMemory
torch.set_num_threads(1)
reshard(Path(sys.argv[1]), Path(sys.argv[2]), 3, Silent())  # libraries and buffers
memory = PeakMemory(torch.device("cpu"))
reshard(Path(sys.argv[3]), Path(sys.argv[4]), 3, Silent(), memory=int(sys.argv[5]))
print(memory.read())
"""


@pytest.mark.ranks
def test_memory_stays_below_what_it_may_take(mesh, tmp_path):
    """200 MB in one box and one file, in a process of its own."""
    values = torch.arange(5 * 10**7, dtype=torch.float32).view(-1, 1000)
    snapshot = store.Snapshot(1, [Piece("weight/a", tuple(values.shape), (0, 0), values)], {}, {"config.yaml": "x: 1"})
    store.save(Folder(tmp_path), snapshot)
    arguments = [str(GOLDEN), str(tmp_path / "small"), str(tmp_path / "step-1"), str(tmp_path / "out"), str(MEMORY)]
    command = [sys.executable, "-W", "ignore", "-c", PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert MEMORY / 8 < int(done.stdout) < MEMORY
    assert inspect.compare(tmp_path / "step-1", tmp_path / "out", Silent()).same
