"""Handing runs to SLURM, with a stub for sbatch."""

from __future__ import annotations

import json
import os

import pytest

from loopscale.cluster.ledger import FOLDER, Ledger
from loopscale.cluster.submit import Launch, again, named
from loopscale.config import ClusterConfig, Config, from_values
from loopscale.errors import ClusterError, ConfigError, UsageError
from tests.conftest import TINY


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """sbatch and srun that accept; what sbatch was given is kept as script-N."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(
        f'#!/bin/sh\nn=$(ls {folder} | grep -c script-); cp "$1" {folder}/script-$n; echo "Submitted batch job $((70 + n))"\n'
    )
    (folder / "srun").write_text("#!/bin/sh\n")
    for name in ("sbatch", "srun"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def config(name: str | None, **changed: dict) -> Config:
    values = {**TINY, "run": {"name": name}, "model": {**TINY["model"], "vocab_size": 400}}
    return from_values(Config, {**values, **changed}).config


def cluster(**content: object) -> ClusterConfig:
    return from_values(ClusterConfig, {"job": {"nodes": 2}, **content}).config


def test_a_run_is_submitted_with_its_snapshot_and_settings_and_again_with_others(slurm, tmp_path):
    run = tmp_path / "runs/a"
    assert Launch.of([config("a")], cluster()).submit() == ["70"]
    assert (run / "code/loopscale/cli.py").exists() and (run / FOLDER / "config.yaml").exists()
    spec = json.loads((run / FOLDER / "spec.json").read_text())
    assert spec["task"]["train"] == [str(run / FOLDER / "config.yaml"), "--resume", "auto"] and spec["steps"] == 20
    assert (run / FOLDER / "token").read_text() == spec["task"]["token"]
    assert again(run, ["job.exclude=n3"]) == "71"
    first, second = ((slurm / f"script-{n}").read_text() for n in (0, 1))
    assert "#SBATCH --exclude=n3" not in first and "#SBATCH --exclude=n3" in second
    assert [(e["event"], e["job"]) for e in Ledger(run).events()] == [("submitted", "70"), ("submitted", "71")]
    with pytest.raises(UsageError, match="already holds a run; `loopscale launch requeue"):
        Launch.of([config("a")], cluster()).submit()


def test_a_study_is_one_array_and_every_run_knows_its_job(slurm, tmp_path):
    runs = [config(name, run={"name": name, "folder": "runs/s"}) for name in ("x-s1", "y-s1", "z-s1")]
    assert Launch.of(runs, cluster(), tmp_path / "runs/s", at_once=2).submit() == ["70_0", "70_1", "70_2"]
    assert "#SBATCH --array=0-2%2" in (slurm / "script-0").read_text()
    assert (tmp_path / "runs/s/code/loopscale").is_dir() and not (tmp_path / "runs/s/x-s1/code").exists()
    assert Ledger(tmp_path / "runs/s/z-s1").events()[0]["job"] == "70_2"


def test_a_chain_is_jobs_of_one_name_that_wait_for_each_other(slurm, tmp_path):
    assert Launch.of([config("c")], cluster(chain=3)).submit() == ["70", "71", "72"]
    scripts = [(slurm / f"script-{n}").read_text().splitlines() for n in range(3)]
    assert all("#SBATCH --dependency=singleton" in script and "#SBATCH --no-requeue" in script for script in scripts)
    assert len({line for script in scripts for line in script if "--job-name" in line}) == 1


def test_what_slurm_refuses_leaves_nothing_behind_so_that_the_same_command_works_later(slurm, tmp_path):
    accepting = (slurm / "sbatch").read_text()
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: fast' >&2\nexit 1\n")
    with pytest.raises(ClusterError, match=r"SLURM refuses the job: .*invalid partition specified: fast"):
        Launch.of([config("a")], cluster()).submit()
    assert not (tmp_path / "runs/a").exists()
    (slurm / "sbatch").write_text(accepting)
    assert Launch.of([config("a")], cluster()).submit() == ["70"]


def test_a_run_is_submitted_again_only_as_its_layout_allows(slurm, tmp_path):
    Launch.of([config("a")], cluster()).submit()
    with pytest.raises(ConfigError, match="3"):
        again(tmp_path / "runs/a", ["job.nodes=3"])
    (tmp_path / "runs/a" / FOLDER / "spec.json").write_text("{")
    with pytest.raises(UsageError, match=r"spec\.json cannot be read"):
        again(tmp_path / "runs/a")


def test_setup_lines_that_are_no_shell_text_and_folders_that_cannot_be_are_told_with_their_key(slurm, tmp_path):
    with pytest.raises(ConfigError, match=r"setup  is no shell text: .*unexpected EOF"):
        Launch.of([config("a")], cluster(setup=["echo 'half"])).submit()
    with pytest.raises(UsageError, match=r"run\.folder is /dev/null/x, which cannot be written: .*Not a directory"):
        Launch.of([config("a", run={"name": "a", "folder": "/dev/null/x"})], cluster()).submit()
    assert not list(slurm.glob("script-*"))


def test_what_cannot_be_started_is_refused_before_slurm_is_asked(slurm, tmp_path):
    with pytest.raises(ConfigError, match="does not divide 3 rank"):
        Launch.of([config("a", parallel={"tensor": 2})], cluster(job={"nodes": 3})).submit()
    assert not list(slurm.glob("script-*")) and not (tmp_path / "runs").exists()


def test_a_run_without_a_name_gets_its_files_and_the_time():
    assert named(config("mine"), "demo").run.name == "mine"
    name = named(config(None), "demo").run.name
    assert name.startswith("demo-20") and len(name) == len("demo-20261201-120000")
