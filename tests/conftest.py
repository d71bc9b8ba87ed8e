"""Shared fixtures: one thread a process, Megatron's groups of a single process, ranks, a corpus, real training runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import yaml

from tests.corpus.conftest import built, texts, write_jsonl
from tests.ranks import Ranks

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

    def command(self, name: str, overrides: Sequence[str], ranks: int, options: Sequence[str]) -> list[str]:
        config = self.folder / "tiny.yaml"
        config.write_text(yaml.safe_dump(TINY))
        own = [f"run.folder={self.folder / 'runs'}", f"run.name={name}", f"corpus.path={self.corpus}", *overrides]
        launcher = [sys.executable, "-m"]
        if ranks > 1:
            launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        return [*launcher, "loopscale", "train", str(config), *own, *options]

    def start(
        self,
        name: str,
        *overrides: str,
        ranks: int = 1,
        options: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        command = self.command(name, overrides, ranks, options)
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def train(self, name: str, *overrides: str, exit_code: int = 0, **more) -> str:
        """Runs to the end; ``more`` as for :meth:`start`. Returns what was printed."""
        process = self.start(name, *overrides, **more)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == exit_code, output
        return output

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
