"""Where a run finds itself again."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest

from loopscale.config import Config, from_values
from loopscale.config.show import differences
from loopscale.errors import CheckpointError, UsageError
from loopscale.train import folder as folders
from loopscale.train.journal import last_record


def config(tmp_path, name=None) -> Config:
    return from_values(Config, {"run": {"folder": str(tmp_path), "name": name}, "batch": {"global_batch": 4}}).config


def test_auto_starts_again_what_has_no_checkpoint_and_a_path_to_it_is_refused(tmp_path):
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    settings = config(tmp_path, "young")
    assert folders.choose(settings, "stem", "auto") == tmp_path / "young"
    assert folders.past(tmp_path / "young", settings, "auto") == folders.Place(tmp_path / "young")
    path = str(tmp_path / "young")
    assert folders.choose(settings, "stem", path) == tmp_path / "young"
    with pytest.raises(UsageError, match="the run has no checkpoint yet"):
        folders.past(tmp_path / "young", settings, path)


def test_checkpoints_of_which_none_is_whole_stop_the_run(tmp_path):
    damaged = tmp_path / "old" / "checkpoints" / "step-3"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints of .*old is whole"):
        folders.past(tmp_path / "old", config(tmp_path, "old"), "auto")


def test_the_newest_of_unnamed_runs_is_the_one_that_auto_means(tmp_path):
    for stamp in ("20260101-000000", "20260301-000000", "20260201-000000"):
        (tmp_path / f"demo-{stamp}").mkdir()
    assert folders.choose(config(tmp_path), "demo", "auto").name == "demo-20260301-000000"
    assert folders.choose(config(tmp_path), "other", "auto").name.startswith("other-")


def test_a_folder_is_held_until_it_is_let_go(tmp_path):
    first = folders.claim(tmp_path / "run")
    with pytest.raises(UsageError, match="is being trained by process"):
        folders.claim(tmp_path / "run")
    first.close()
    folders.claim(tmp_path / "run").close()


def test_differences_name_the_dotted_key():
    before, now = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [2]}, "e": 3}
    assert differences(before, now) == [("a.c", [1], [2]), ("d", 2, None), ("e", None, 3)]


def test_a_lock_that_someone_only_looks_at_is_waited_for(tmp_path):
    with (tmp_path / ".lock").open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_EX)
        threading.Timer(0.15, lambda: fcntl.flock(looked_at, fcntl.LOCK_UN)).start()
        folders.claim(tmp_path).close()
        fcntl.flock(looked_at, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being trained by"):
            folders.claim(tmp_path)


def test_a_full_disk_leaves_the_old_configuration_and_is_told_with_its_path(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("the old one")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)  # there is no full disk that every machine has
    with pytest.raises(OSError, match="No space left on device") as caught:
        folders.describe(tmp_path, config(tmp_path), {}, {})
    assert caught.value.filename == str(tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("tail", ['{"step": 15, "los{"step": 15, "loss": 3}\n', '{"step": 7, "loss": 3}}}\n', '{"st', "[]\n"])
def test_the_last_record_is_the_last_whole_one(tmp_path, tail):
    (tmp_path / "metrics.jsonl").write_text('{"step": 13, "loss": 4}\n{"step": 14, "loss": 4}\n' + tail)
    assert last_record(tmp_path) == {"step": 14, "loss": 4}
