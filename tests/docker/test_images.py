"""The CPU image, built, and two containers of it that train together: where there is an engine with a base image."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim"
NAME = "loopscale-test"
TRAIN = ["train", "configs/run/demo.yaml", "train.steps=3", "train.threads=1", "log.every=1"]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(3600)]


class Engine:
    def __init__(self, program: str):
        self.program = program

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def has(self, image: str) -> bool:
        return subprocess.run([self.program, "image", "inspect", image], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One that has the base image, with the CPU image, a network, and a corpus in a volume."""
    engines = [Engine(name) for name in ("podman", "docker") if shutil.which(name)]
    engine = next((engine for engine in engines if engine.has(BASE)), None)
    if engine is None:
        pytest.skip(f"no engine here has {BASE}" if engines else "neither podman nor docker is here")
    engine("build", "--network", "host", "-f", str(ROOT / "docker" / "cpu.Dockerfile"), "-t", NAME, str(ROOT))
    engine("network", "create", NAME)
    engine("volume", "create", NAME)
    try:
        engine("run", "--rm", "-v", f"{NAME}:/workspace", NAME, "corpus", "build", "configs/corpus/sotu.yaml")
        yield engine
    finally:
        engine("volume", "rm", "--force", NAME)
        engine("network", "rm", "--force", NAME)


def losses(engine: Engine, run: str) -> list[float]:
    records = engine("run", "--rm", "-v", f"{NAME}:/workspace", NAME, "cat", f"runs/{run}/metrics.jsonl")
    return [record["loss"] for record in map(json.loads, records.splitlines()) if "loss" in record]


def test_two_containers_train_what_one_does(engine):
    options = ["--shm-size", "1g", "--network", NAME, "-v", f"{NAME}:/workspace"]
    engine("run", "--rm", *options, NAME, *TRAIN, "run.name=one")
    world = ["-e", "WORLD_SIZE=2", "-e", f"MASTER_ADDR={NAME}-0", "-e", "MASTER_PORT=29500"]
    containers = [f"{NAME}-{rank}" for rank in range(2)]
    try:
        for rank, name in enumerate(containers):
            engine("run", "--detach", "--name", name, *options, *world, "-e", f"RANK={rank}", NAME, *TRAIN, "run.name=two")
        codes = [engine("wait", name).strip() for name in containers]
        assert codes == ["0", "0"], engine("logs", containers[0])
    finally:
        engine("rm", "--force", *containers)
    one, two = losses(engine, "one"), losses(engine, "two")
    assert len(one) == 3
    assert two == pytest.approx(one, rel=1e-5)


def test_any_user_under_a_read_only_root(engine):
    printed = engine("run", "--rm", "--user", "12345:12345", "--read-only", "--tmpfs", "/tmp", NAME, "doctor", "--json")
    assert "12345" in engine("run", "--rm", "--user", "12345:12345", NAME, "id")
    assert json.loads(printed)


def test_root_is_not_the_user(engine):
    assert engine("run", "--rm", NAME, "id", "-u") == "10001\n"
