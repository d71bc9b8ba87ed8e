"""Shared fixtures: one thread a process, Megatron's groups of a single process, ranks, a corpus, real training runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import yaml

from tests.corpus.conftest import built, texts, write_jsonl
from tests.launch import NOTHING
from tests.ranks import Ranks
from tests.train.jobs import Job

TINY = {
    "corpus": {"sequence_length": 32},
    "model": {"hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_size": 48},
    "depth": {"mean": 3, "backprop": 3, "cap": 8, "groups": 2},
    "batch": {"global_batch": 8},
    "optimizer": {"lr": 3e-3, "eps": 1e-4},  # or Adam makes a full step of the rounding of a gradient that is next to nothing
    "train": {"steps": 20, "threads": 1},
    "validation": {"every": 0, "sequences": 4},
    "checkpoint": {"every": 5},
    "log": {"every": 1, "wandb": "disabled", "tensorboard": False},
}
"""A run of a second, start aside."""


@pytest.fixture(scope="session")
def mesh():
    """Megatron's groups of a single process."""
    import torch

    from loopscale.config.tree import ParallelConfig
    from loopscale.parallel import mesh

    torch.set_num_threads(1)
    return mesh.start(ParallelConfig())


@pytest.fixture(scope="session")
def ranks():
    """Processes for functions that several ranks run: ``ranks.run(function, size, ...)``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built corpus of some 300 made-up documents."""
    folder = tmp_path_factory.mktemp("text-corpus")
    built(folder / "corpus", write_jsonl(folder / "texts.jsonl", texts(300)))
    return folder / "corpus"


class Runs:
    """Starts ``loopscale train`` as a user does, and reads what it left."""

    def __init__(self, folder: Path, corpus: Path):
        self.folder, self.corpus = folder, corpus

    def command(
        self, name: str, *overrides: str, options: Sequence[str] = (), config: Path | None = None, script: str | None = None
    ) -> list[str]:
        """Command line of a run; ``script``: one that ends in calling loopscale, in its place."""
        if config is None:
            config = self.folder / "tiny.yaml"
            config.write_text(yaml.safe_dump(TINY))
        own = [f"run.folder={self.folder / 'runs'}", f"run.name={name}", f"corpus.path={self.corpus}", *overrides]
        program = ["-m", "loopscale"] if script is None else [script]
        return [sys.executable, *program, "train", str(config), *own, *options]

    def job(self, name: str, commands: Sequence[Sequence[str]], **more: Any) -> Job:
        """Starts a run, a command for each of its ranks; ``more`` as for :class:`Job`."""
        return Job(self.folder, name, commands, **more)

    def start(self, name: str, *overrides: str, ranks: int = 1, environment: Mapping[str, str] = NOTHING, **more: Any) -> Job:
        """Starts a run; ``more`` as for :meth:`command`."""
        return self.job(name, [self.command(name, *overrides, **more)] * ranks, environment=environment)

    def train(self, name: str, *overrides: str, exit_code: int = 0, **more: Any) -> str:
        """Runs to the end; ``more`` as for :meth:`start`. Returns what rank 0 printed."""
        with self.start(name, *overrides, **more) as job:
            assert set(job.wait_for_end()) == {exit_code}, job.all_printed()
            return job.printed(0)

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def records(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.path(name) / "metrics.jsonl").read_text().splitlines()]

    def journal(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.path(name) / "journal.jsonl").read_text().splitlines()]

    def manifest(self, name: str) -> dict:
        return json.loads((self.path(name) / "manifest.json").read_text())

    def weights(self, name: str, step: int) -> dict:
        from loopscale.checkpoint import store

        return store.load_whole(self.path(name) / "checkpoints" / f"step-{step}")


@pytest.fixture
def runs(tmp_path: Path, text_corpus: Path) -> Runs:
    return Runs(tmp_path, text_corpus)


@pytest.fixture
def threads_as_before():
    """An evaluation takes all cores; small tests after it would be ten times slower on them than on one."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
