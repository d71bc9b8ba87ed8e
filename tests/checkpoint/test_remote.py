"""Checkpoints in an object store: a local S3 server stands for the cloud, everything else is what users have."""

from __future__ import annotations

import contextlib
import socket

import fsspec
import pytest
import torch

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import ObjectStore
from loopscale.checkpoint.parts import Piece
from loopscale.errors import CheckpointError
from tests.conftest import Runs

moto = pytest.importorskip("moto.server", reason="moto[server] is not installed: pip install '.[dev]'")
pytest.importorskip("s3fs", reason="s3fs is not installed: pip install '.[dev]'")


@pytest.fixture(scope="module")
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    yield f"http://127.0.0.1:{port}"
    running.stop()


@pytest.fixture
def settings(server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture
def bucket(settings, monkeypatch, request) -> str:
    """A new, empty bucket."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    url = f"s3://{request.node.name.replace('_', '-')[:60]}"
    fsspec.filesystem("s3").mkdir(url)
    return url


def pieces(value: float = 0.0) -> list[Piece]:
    return [Piece("weight/a", (64, 33), (0, 0), torch.full((64, 33), value))]


def save(url: str, step: int) -> None:
    store.save(ObjectStore(url), store.Snapshot(step, pieces(float(step)), {"step": step}, {"config.yaml": ""}))


def objects(url: str) -> set[str]:
    return {path.partition("/")[2] for path in fsspec.filesystem("s3").find(url, refresh=True)}


def test_what_is_saved_is_found_and_loaded(mesh, bucket, tmp_path):
    for step in (1, 10, 9):
        save(bucket, step)
    assert ObjectStore(bucket).steps() == [10, 9, 1]
    checkpoint, passed_over = store.newest_whole(ObjectStore(bucket), "stop", tmp_path)
    assert passed_over == []
    loaded = pieces()
    store.load(checkpoint, loaded)
    assert (loaded[0].here == 10.0).all()
    assert store.load_state(checkpoint) == {"step": 10}


def test_one_that_was_not_finished_or_has_lost_an_object_is_passed_over(mesh, bucket, tmp_path):
    for step in (1, 2, 3):
        save(bucket, step)
    files = fsspec.filesystem("s3")
    files.rm_file(f"{bucket}/step-3/manifest.json")  # as a save that is killed leaves it
    files.rm_file(f"{bucket}/step-2/tensors/rank-00000-000.safetensors")
    checkpoint, passed_over = store.newest_whole(ObjectStore(bucket), "fall_back", tmp_path)
    assert checkpoint.name == "step-1"
    assert passed_over == ["checkpoint step-2 is damaged: tensors/rank-00000-000.safetensors is missing"]
    save(bucket, 3)
    assert ObjectStore(bucket).steps() == [3, 2, 1]


def test_removed_and_set_aside_ones_are_not_found(mesh, bucket):
    for step in (1, 2, 3):
        save(bucket, step)
    storage = ObjectStore(bucket)
    storage.remove(1)
    assert storage.set_aside(3) == "step-3/superseded.json"
    assert storage.steps() == [2]
    assert not [name for name in objects(bucket) if name.startswith("step-1/")]
    assert "step-3/superseded.json" in objects(bucket)


def test_a_server_that_does_not_answer_is_a_save_that_failed(mesh, monkeypatch):
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1", "AWS_ACCESS_KEY_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match="checkpoint of step 1 could not be saved"):
        save("s3://nowhere/run", 1)


@pytest.mark.ranks
def test_a_run_of_two_ranks_keeps_its_checkpoints_there_and_goes_on_from_them(runs: Runs, bucket, settings):
    """Twelve steps and eight more; the same losses as with a folder. The run's folder has no checkpoint; evaluation takes the
    URL."""
    two = {"ranks": 2, "environment": settings}
    runs.train("near", ranks=2)
    there = f"checkpoint.folder={bucket}/runs"
    runs.train("far", there, "checkpoint.every=4", **two)
    assert not list((runs.path("far") / "checkpoints").glob("step-*"))
    assert ObjectStore(f"{bucket}/runs/far").steps() == [20, 16, 12]
    for step in (20, 16):
        ObjectStore(f"{bucket}/runs/far").remove(step)
    output = runs.train("far", there, "parallel.tensor=2", options=["--resume", "auto"], **two)
    assert "from checkpoints/step-12" in output
    near, far = runs.records("near"), runs.records("far")
    assert [r["step"] for r in far] == list(range(1, 21))
    assert [r["loss"] for r in far] == pytest.approx([r["loss"] for r in near], rel=1e-5)
    assert not (runs.path("far") / "fetched").exists()
    with contextlib.redirect_stdout(None):
        from loopscale.evaluate.run import evaluate

        found = evaluate(f"{bucket}/runs/far/step-20", depths="3", sequences=4)
    assert found.losses[3] == pytest.approx(far[-1]["validation"]["3"], rel=1e-4)
