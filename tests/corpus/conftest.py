"""Small synthetic texts and a corpus built from them once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopscale.config import CorpusBuild, from_values
from loopscale.corpus.build import build
from loopscale.corpus.folder import Corpus
from loopscale.corpus.progress import Silent


def texts(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Made-up documents of various lengths out of a few hundred words, some of them not ASCII."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyzéß中"
    vocabulary = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(300)]
    return [f"Text {i}. " + " ".join(draw.choices(vocabulary, k=draw.randint(3, 2 * words))) for i in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def configured(output: Path, *sources: Any, **changes: Any) -> CorpusBuild:
    """A build of files (or of source mappings) with a small tokenizer, in this process unless told."""
    listed = [s if isinstance(s, dict) else {"kind": "files", "path": str(s)} for s in sources]
    values = {"output": str(output), "sources": listed, "tokenizer": {"vocab_size": 400}, "held_out": 0.2, "processes": 1}
    return from_values(CorpusBuild, {**values, **changes}).config


def built(output: Path, *sources: Any, **changes: Any) -> Corpus:
    return build(configured(output, *sources, **changes), progress=Silent())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and units out of little text."""
    monkeypatch.setattr("loopscale.corpus.arrange.PIECE_BYTES", 4000)
    monkeypatch.setattr("loopscale.corpus.build.PIECE_BYTES", 4000)
    monkeypatch.setattr("loopscale.corpus.build.RECORD_TOKENS", 50)
    monkeypatch.setattr("loopscale.corpus.documents.UNIT_BYTES", 1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    """Some 100 documents in several shards, with records shorter than the longest documents."""
    folder = tmp_path_factory.mktemp("corpus")
    source = write_jsonl(folder / "texts.jsonl", texts(120))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscale.corpus.build.RECORD_TOKENS", 50)
        yield built(folder / "out", source, shard_size=4000)
