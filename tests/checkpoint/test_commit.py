"""The commit protocol: whole or absent, whatever stage a save is killed at."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import torch

from loopscale.checkpoint import commit, store
from loopscale.errors import CheckpointError
from tests.launch import Launched


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"weight/{name}": torch.full((64, 33), value) for name in ("a", "b", "c")}


def save(folder, step, interrupt=None):
    return store.save(folder, step, tensors(float(step)), {"step": step}, {"config.yaml": "x: 1\n"}, interrupt=interrupt)


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
    found, passed_over = store.newest_whole(tmp_path, "stop")
    assert (found, passed_over) == (tmp_path / f"step-{survives}", [])
    assert store.load_state(found)["step"] == survives
    save(tmp_path, 3)
    assert not list(tmp_path.glob("*.writing"))


def test_what_is_saved_is_loaded(mesh, tmp_path):
    checkpoint = save(tmp_path, 5)
    loaded = store.load_tensors(checkpoint, {n: tuple(t.shape) for n, t in tensors(5.0).items()})
    assert all(torch.equal(loaded[n], t) for n, t in tensors(5.0).items())


@pytest.mark.parametrize("file", ["tensors/__0_0.distcp", "state.json", "config.yaml", "tensors/.metadata"])
def test_a_flipped_byte_is_found_and_the_file_named(mesh, tmp_path, file):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found, passed_over = store.newest_whole(tmp_path, "fall_back")
    assert found == tmp_path / "step-1"
    assert passed_over[0].startswith(f"checkpoint step-2 is damaged: {file} has digest ")
    with pytest.raises(CheckpointError, match="step-2 is damaged"):
        store.newest_whole(tmp_path, "stop")


def test_a_missing_or_cut_file_is_found(mesh, tmp_path):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "config.yaml").write_text("x")
    with pytest.raises(CheckpointError, match=r"config\.yaml has 1 bytes, the manifest says 5"):
        commit.verify(checkpoint)
    (checkpoint / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        commit.verify(checkpoint)


def test_an_uncommitted_folder_is_no_checkpoint(mesh, tmp_path):
    commit.begin(tmp_path, 7)
    assert store.newest_whole(tmp_path, "stop") == (None, [])
    with pytest.raises(CheckpointError, match="its save was cut short"):
        commit.verify(tmp_path / "step-7.writing")


def test_a_model_of_another_shape_is_refused_with_every_difference(mesh, tmp_path):
    checkpoint = save(tmp_path, 1)
    with pytest.raises(CheckpointError) as raised:
        store.load_tensors(checkpoint, {"weight/a": (64, 33), "weight/b": (3,), "weight/d": (1,)})
    said = str(raised.value)
    assert "weight/d is missing" in said
    assert "weight/b has shape [64, 33], the model [3]" in said
    assert "weight/c is not in the model" in said


def test_retention_keeps_the_newest_and_the_multiples(mesh, tmp_path):
    for step in (1, 2, 3, 4, 5, 6):
        save(tmp_path, step)
    removed = commit.prune(tmp_path, keep=2, keep_every=3)
    assert {p.name for p in removed} == {"step-1", "step-2", "step-4"}
    assert [p.name for p in commit.committed(tmp_path)] == ["step-6", "step-5", "step-3"]


@pytest.mark.parametrize(
    "manifest", ["[]", '{"format": 1, "files": []}', '{"format": 1, "files": {}}', "\x00", '{"format": 99, "files": {}}']
)
def test_a_manifest_that_makes_no_sense_is_damage(mesh, tmp_path, manifest):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "manifest.json").write_text(manifest)
    assert store.newest_whole(tmp_path, "fall_back")[0] is None
    with pytest.raises(CheckpointError, match="checkpoint step-1"):
        commit.verify(checkpoint)


def test_a_disk_without_room_is_told_before_anything_is_written(mesh, tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"could not be saved: it needs 0 MB and its disk has 0 MB free"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_disk_that_refuses_leaves_the_one_before(mesh, tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "commit", full)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 could not be saved: .*No space left"):
        save(tmp_path, 2)
    assert store.newest_whole(tmp_path, "stop") == (tmp_path / "step-1", [])
