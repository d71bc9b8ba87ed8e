"""Where a run finds itself again."""

from __future__ import annotations

import pytest

from loopscale.config import Config, from_values
from loopscale.config.show import differences
from loopscale.errors import CheckpointError, UsageError
from loopscale.train import folder as folders


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
