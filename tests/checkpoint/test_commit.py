"""The commit protocol: whole or absent, whatever stage a save is killed at."""

from __future__ import annotations

import os
import shutil
import signal
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Folder, outlived
from loopscale.checkpoint.parts import Piece
from loopscale.checkpoint.saver import BEST, Saver
from loopscale.config.tree import CheckpointConfig
from loopscale.errors import CheckpointError
from tests.launch import Launched

SHAPE = (64, 33)
NAMES = ("weight/a", "weight/b", "weight/c")


def pieces(value: float = 0.0) -> list[Piece]:
    return [Piece(name, SHAPE, (0, 0), torch.full(SHAPE, value)) for name in NAMES]


def save(folder, step, interrupt=None, **facts):
    snapshot = store.Snapshot(step, pieces(float(step)), {"step": step}, {"config.yaml": "x: 1\n"}, facts)
    store.save(Folder(folder), snapshot, interrupt=interrupt)
    return folder / f"step-{step}"


def newest(folder, on_damage="fall_back"):
    return store.newest_whole(Folder(folder), on_damage, folder)


def _die_at(folder, step, stage):
    from loopscale.config.tree import ParallelConfig
    from loopscale.parallel import mesh

    torch.set_num_threads(1)
    mesh.start(ParallelConfig())
    save(folder, step, lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == stage else None)


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "survives"), [("begun", 1), ("tensors", 1), ("written", 1), ("committed", 2)])
def test_a_save_killed_at_any_stage_leaves_the_newest_whole_one(mesh, tmp_path, stage, survives):
    save(tmp_path, 1)
    process = Launched(_die_at, (tmp_path, 2, stage), tmp_path / "printed.txt")
    assert process.wait(120) == -signal.SIGKILL, process.printed()
    found, passed_over = newest(tmp_path, "stop")
    assert (found, passed_over) == (tmp_path / f"step-{survives}", [])
    assert store.load_state(found)["step"] == survives
    save(tmp_path, 3)
    assert not list(tmp_path.glob("*.writing"))


def test_what_is_saved_is_loaded(mesh, tmp_path):
    checkpoint = save(tmp_path, 5)
    loaded = pieces()
    store.load(checkpoint, loaded)
    assert all((piece.here == 5.0).all() for piece in loaded)
    with safe_open(checkpoint / "tensors" / "rank-00000-000.safetensors", "pt") as file:  # as any tool would
        assert torch.equal(file.get_tensor("weight/b[0:64,0:33]"), torch.full(SHAPE, 5.0))


@pytest.mark.parametrize("file", ["tensors/rank-00000-000.safetensors", "state.json", "config.yaml", "tensors/index.json"])
def test_a_flipped_byte_is_found_and_the_file_named(mesh, tmp_path, file):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found, passed_over = newest(tmp_path, "fall_back")
    assert found == tmp_path / "step-1"
    assert passed_over[0].startswith(f"checkpoint step-2 is damaged: {file} has digest ")
    with pytest.raises(CheckpointError, match="step-2 is damaged"):
        newest(tmp_path, "stop")


def test_a_missing_or_cut_file_is_found(mesh, tmp_path):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "config.yaml").write_text("x")
    with pytest.raises(CheckpointError, match=r"config\.yaml has 1 bytes, the manifest says 5"):
        store.verify(checkpoint)
    (checkpoint / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        store.verify(checkpoint)


def test_an_uncommitted_folder_is_no_checkpoint(mesh, tmp_path):
    Folder(tmp_path).begin(7)
    assert newest(tmp_path, "stop") == (None, [])
    with pytest.raises(CheckpointError, match="its save was cut short"):
        store.verify(tmp_path / "step-7.writing")


def test_a_model_of_another_shape_is_refused_with_every_difference(mesh, tmp_path):
    checkpoint = save(tmp_path, 1)
    with pytest.raises(CheckpointError) as raised:
        store.load(
            checkpoint, [Piece(n, (k,), (0,), torch.empty(k)) for n, k in (("weight/b", 3), ("weight/d", 1))], ["weight/a"]
        )
    said = str(raised.value)
    assert "weight/d is missing" in said
    assert "weight/b has shape [64, 33], the model [3]" in said
    assert "weight/c is not in the model" in said


@given(
    scores=st.dictionaries(st.integers(1, 40), st.none() | st.sampled_from([1.0, 2.0, 3.0]), min_size=1),
    keep=st.integers(1, 4),
    keep_every=st.integers(0, 5),
    keep_best=st.integers(0, 3),
)
def test_retention_keeps_the_newest_the_multiples_and_the_best(scores, keep, keep_every, keep_best):
    known = {step: score for step, score in scores.items() if score is not None}
    gone = outlived(list(scores), known, keep, keep_every, keep_best)
    kept = set(scores) - set(gone)
    assert set(sorted(scores)[-keep:]) <= kept
    assert all(step in kept for step in scores if keep_every and step % keep_every == 0)
    for step in gone:  # whatever goes is older than all of the newest, and at least so many are better, or as good and newer
        assert sum(later > step for later in scores) >= keep
        if step in known:
            assert sum((score, -s) < (known[step], -step) for s, score in known.items()) >= keep_best
    assert len(kept) <= keep + keep_best + sum(1 for s in scores if keep_every and s % keep_every == 0)


def test_a_run_keeps_its_best_and_calls_it_so(mesh, tmp_path):
    saver = Saver(Folder(tmp_path), CheckpointConfig(keep=1, keep_best=1), None)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        saver.save(store.Snapshot(step, pieces(), {}, {"config.yaml": ""}, {BEST: loss}))
    assert Folder(tmp_path).steps() == [4, 2]
    assert (tmp_path / "best").resolve() == tmp_path / "step-2"


def test_a_copied_run_goes_on_calling_its_best_so_and_what_cannot_be_removed_does_not_undo_a_save(mesh, tmp_path, monkeypatch):
    saver = Saver(Folder(tmp_path), CheckpointConfig(keep=1), None)
    (tmp_path / "best").mkdir()  # as a copy that follows links leaves it
    assert saver.save(store.Snapshot(1, pieces(), {}, {"config.yaml": ""}, {BEST: 3.0})).fault == ""
    assert (tmp_path / "best").resolve() == tmp_path / "step-1"

    def refuse(*_):
        raise PermissionError(13, "Permission denied", "step-1")

    monkeypatch.setattr(Folder, "remove", refuse)
    saved = saver.save(store.Snapshot(2, pieces(), {}, {"config.yaml": ""}, {BEST: 2.0}))
    assert (saved.step, saved.fault) == (2, "step-1: Permission denied")
    assert Folder(tmp_path).steps() == [2, 1]


def test_a_background_save_holds_what_was_when_it_was_asked_for(mesh, tmp_path):
    """A writer that waits: training goes on meanwhile, and neither weights nor counters of later enter the file; nothing is
    removed before it is committed."""
    storage, gate = Slow(tmp_path), threading.Event()
    saver = Saver(storage, CheckpointConfig(keep=1, keep_best=0, background=True), None)
    saver.save(store.Snapshot(1, pieces(1.0), {"step": 1}, {"config.yaml": ""}))
    storage.gate = gate
    live, state = pieces(2.0), {"step": 2, "window": [1]}
    saver.request(store.Snapshot(2, live, state, {"config.yaml": ""}))
    for piece in live:
        piece.here.fill_(7.0)
    state["step"] = 3
    state["window"].append(2)
    assert not saver.is_done()
    assert storage.steps() == [1]
    gate.set()
    assert saver.wait().step == 2
    assert storage.steps() == [2]
    loaded = pieces()
    store.load(tmp_path / "step-2", loaded)
    assert all((piece.here == 2.0).all() for piece in loaded)
    assert store.load_state(tmp_path / "step-2") == {"step": 2, "window": [1]}
    assert saver.wait() is None


class Slow(Folder):
    """A folder that publishes when it is let."""

    gate: threading.Event | None = None

    def publish(self, step):
        if self.gate is not None:
            assert self.gate.wait(60)
        super().publish(step)


def test_a_background_save_that_fails_is_told_to_who_waits(mesh, tmp_path):
    class Full(Folder):
        def publish(self, step):
            raise OSError(28, "No space left on device")

    saver = Saver(Full(tmp_path), CheckpointConfig(background=True), None)
    saver.request(store.Snapshot(1, pieces(), {}, {"config.yaml": ""}))
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 could not be saved: .*No space left"):
        saver.wait()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "manifest",
    ["[]", '{"format": 1, "files": []}', '{"format": 1, "files": {}}', "\x00", '{"format": 99, "files": {}}', "[" * 100000],
)
def test_a_manifest_that_makes_no_sense_is_damage(mesh, tmp_path, manifest):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "manifest.json").write_text(manifest)
    assert newest(tmp_path, "fall_back")[0] is None
    with pytest.raises(CheckpointError, match="checkpoint step-1"):
        store.verify(checkpoint)


def test_a_disk_without_room_is_told_before_anything_is_written(mesh, tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"could not be saved: it needs 0 MB and its disk has 0 MB free"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_disk_that_refuses_leaves_the_one_before(mesh, tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "publish", full)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 could not be saved: .*No space left"):
        save(tmp_path, 2)
    assert newest(tmp_path, "stop") == (tmp_path / "step-1", [])
