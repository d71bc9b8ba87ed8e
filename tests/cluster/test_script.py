"""The batch script of a job: what it asks for, and what it does, run by bash with stubs for SLURM's commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from loopscale.cluster.script import executor, script_text
from loopscale.config import ClusterConfig, from_values


def text_of(launched: Path, tasks: int = 1, at_once: int | None = None, **content: object) -> str:
    cluster = from_values(ClusterConfig, content).config
    return script_text(executor(launched, "name", cluster, at_once), tasks)


def test_what_the_job_asks_for(tmp_path):
    job = {
        "nodes": 8, "devices": 8, "spares": 1, "time": 2880, "partition": "h100", "account": "ml", "qos": "high",
        "constraint": "ib", "exclude": "n3", "cpus": 12, "memory": 1500.5, "notice": 300,
        "sbatch": ["reservation=big"], "srun": ["--cpu-bind=cores"],
    }  # fmt: skip
    text = text_of(tmp_path, job=job)
    flags = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH"))
    logs = f"{tmp_path}/launch/logs"
    assert flags == {
        "nodes": "9", "ntasks-per-node": "8", "gpus-per-node": "8", "time": "2880", "partition": "h100", "account": "ml",
        "qos": "high", "constraint": "ib", "exclude": "n3", "cpus-per-task": "12", "mem": "1500500M",
        "signal": "USR2@300", "exclusive": "",
        "reservation": "big", "requeue": "", "open-mode": "append", "job-name": "name",
        "output": f"{logs}/%j_0_log.out", "error": f"{logs}/%j_0_log.err",
    }  # fmt: skip
    (srun,) = (shlex.split(line) for line in text.splitlines() if line.startswith("srun "))
    assert srun[-5:] == [sys.executable, "-u", "-m", "submitit.core._submit", logs]
    assert {"--kill-on-bad-exit=0", "--cpus-per-task=12", "--cpu-bind=cores"} < set(srun)


def test_runs_of_a_study_are_an_array_with_a_limit(tmp_path):
    assert "#SBATCH --array=0-5%2" in text_of(tmp_path, tasks=6, at_once=2).splitlines()


@pytest.mark.parametrize(
    ("container", "srun", "python"),
    [
        (
            {"engine": "pyxis", "image": "/images/l.sqsh", "mounts": ["/data:/data"]},
            ["--container-image=/images/l.sqsh", "--container-mounts={here}:{here},{run}:{run},/data:/data",
             "--container-workdir={here}"],
            ["python"],
        ),
        (
            {"engine": "apptainer", "image": "l.sif", "arguments": ["--cleanenv"], "python": "/opt/venv/bin/python"},
            [],
            ["apptainer", "exec", "--nv", "--pwd", "{here}", "--bind", "{here}:{here}", "--bind", "{run}:{run}", "--cleanenv",
             "l.sif", "/opt/venv/bin/python"],
        ),
        (
            {"engine": "podman", "image": "localhost/l"},
            [],
            ["podman", "run", "--rm", "--network", "host", "--uts", "host", "--ipc", "host", "--env-host", "--entrypoint", "",
             "--workdir", "{here}", "--device", "nvidia.com/gpu=all", "--volume", "{here}:{here}", "--volume", "{run}:{run}",
             "localhost/l", "python"],
        ),
    ],
    ids=["pyxis", "apptainer", "podman"],
)  # fmt: skip
def test_tasks_start_in_a_container(tmp_path, monkeypatch, container, srun, python):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/a"
    names = {"here": str(tmp_path), "run": str(run)}
    (line,) = (line for line in text_of(run, container=container).splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    assert [w.format(**names) for w in srun] == [w for w in words if w.startswith("--container")]
    start = words.index(python[0], 1)
    assert words[start : words.index("-u")] == [w.format(**names) for w in python]


def play(folder: Path, text: str, srun: str, **environment: str) -> tuple[int, list[str]]:
    """Runs a batch script by bash; ``srun`` is the stub's text. Returns its exit code and SLURM's commands that it called."""
    stubs = folder / "stubs"
    stubs.mkdir()
    called = folder / "called"
    called.touch()
    for name, body in (
        ("srun", srun),
        ("scontrol", f"echo scontrol $* >> {called}; exit 1"),
        ("scancel", f"echo scancel $* >> {called}"),
    ):
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    given = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "USER": "u",
        "SLURM_JOB_NAME": "name-abc",
        **environment,
    }
    done = subprocess.run(["bash"], input=text, text=True, env=given, capture_output=True)
    return done.returncode, called.read_text().splitlines()


@pytest.mark.parametrize(
    ("marked", "chain", "calls"),
    [
        ("requeue-7-0", 1, ["scontrol requeue 7"]),
        ("requeue-7-1", 1, []),  # of another start
        ("began-7-0", 1, ["scontrol requeue 7"]),  # killed without a word
        ("began-7-0 ended-7-0", 1, []),
        ("requeue-7-0", 3, []),  # the next in the chain goes on
        ("", 3, ["scancel --user=u --name=name-abc --state=PENDING"]),  # finished or failed: nothing is left for the others
    ],
)
def test_a_marked_job_is_queued_again_and_its_exit_code_stays(tmp_path, marked, chain, calls):
    mark = "".join(f"touch {tmp_path}/launch/{name}; " for name in marked.split())
    srun = f"mkdir -p {tmp_path}/launch; {mark}exit 75"
    assert play(tmp_path, text_of(tmp_path, chain=chain), srun) == (75, calls)
    told = tmp_path / "launch/ends/7.0.batch"
    assert told.exists() == bool(calls and chain == 1)  # the stub of scontrol refuses


def test_ranks_run_the_snapshot_with_the_environment_of_the_file(tmp_path):
    srun = f'echo "$PYTHONPATH $PYTHONSAFEPATH $A $B $(( $(date +%s) - LOOPSCALE_JOB_BEGAN ))" > {tmp_path}/seen'
    text = text_of(tmp_path, environment=["A=it's 1", "B=2"], setup=["B=$((B + 1))  # a comment", "PYTHONPATH=/theirs"])
    assert play(tmp_path, text, srun, PYTHONPATH="/mine") == (0, [])
    seen, seconds = (tmp_path / "seen").read_text().rsplit(maxsplit=1)
    assert seen == f"{tmp_path}/code:/theirs 1 it's 1 3" and int(seconds) < 60


@pytest.mark.parametrize(
    "line", ["module load cuda/99 2> /dev/null", "exit 0", "exit 3  # of a script of the site", "false | false"]
)
def test_a_setup_line_that_fails_or_exits_ends_the_job_with_its_text(tmp_path, line):
    text = text_of(tmp_path, setup=["# a comment", "", "true  # and another", line, f"touch {tmp_path}/never"])
    assert play(tmp_path, text, f"touch {tmp_path}/started") == (1, [])
    assert (tmp_path / "launch/ends/7.0.batch").read_text() == f"setup failed: {line}\n"
    assert not (tmp_path / "started").exists() and not (tmp_path / "never").exists()
