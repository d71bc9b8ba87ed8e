"""A run folder made by hand, for the report's tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

PERPLEXITIES = (231.0, 141.0, 112.0, 99.2, 94.3, 93.9, 93.7, 93.8, 93.9, 94.1)


def record(step: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "tokens": step * 2048,
        "tokens_per_s": 2900.0 + step,
        "matmul_share": 0.81,
        "elapsed": step * 0.7,
        "depths": [3, 4, 6, 7],
        "state_norm": [8.0, 8.1, 8.2],
        "state_norm_p99": [10.0, 10.1, 10.2],
        "skipped": 0,
        "memory": {"parameters": [2**28, 2**29], "activations": [2**29, 2**28], "peak": [2**30, 3 * 2**28]},
    } | changes


def evaluation(perplexities: tuple[float, ...] = PERPLEXITIES, **changes: Any) -> dict[str, Any]:
    return {
        "created": "2026-11-30T06:10:00+00:00",
        "checkpoint": "step-30",
        "source": "validation split of data/sotu",
        "depths": list(range(1, len(perplexities) + 1)),
        "loss": [math.log(value) for value in perplexities],
        "perplexity": list(perplexities),
        "tokens": 8192,
        "sequences": 64,
        "sequence_length": 128,
        "baselines": {"unigram": math.log(571), "bigram": math.log(63)},
        "protocol": "own KV at every depth, whole sequences, documents isolated",
    } | changes


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "created": "2026-11-30T06:00:00+00:00",
        "versions": {"torch": "2.14.1"},
        "git": {"revision": "f57258f61cffc419f6feab020267cffd0d2ce7a1", "dirty": True, "diff": "+ a secret"},
        "layout": {"tensor": 1, "data": 2},
        "seed": 7,
        "corpus": {"path": "data/sotu", "fingerprint": "5c1e", "train_tokens": 61440, "vocab_size": 4096},
        "parameters": {"total": 1_912_448, "non_embedding": 863_872, "effective": 3_400_000},
        "prior": {"name": "pln", "mean": 5, "pmf": [0.0, 0.1, 0.2, 0.1, 0.1, 0.2, 0.3]},
        "origins": {"model.hidden_size": "configs/tiny.yaml"},
    } | changes


def write(folder: Path, records: list[dict[str, Any]], **files: Any) -> Path:
    """A run folder; ``files`` may be manifest, config, events, evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if "manifest" in files:
        (folder / "manifest.json").write_text(json.dumps(files["manifest"]))
    if "config" in files:
        (folder / "config.yaml").write_text(yaml.safe_dump(files["config"], sort_keys=False))
    if "events" in files:
        (folder / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in files["events"]))
    (folder / "evaluations").mkdir(exist_ok=True)
    for index, each in enumerate(files.get("evaluations", ())):
        (folder / "evaluations" / f"{index}.json").write_text(json.dumps(each))
    return folder


def whole(folder: Path) -> Path:
    """A finished run with everything that a report shows."""
    records = [
        record(10, 8.0, state_norm=[8.0, 12.0, 16.0]),
        record(20, None, validation={"1": 6.0, "5": 5.5}),
        record(30, 4.61, validation={"1": 5.2, "5": 4.55}),
    ]
    events = [
        {"time": "2026-11-30T06:01:00+00:00", "kind": "saved", "step": 20, "message": "checkpoints/step-20"},
        {"time": "2026-11-30T06:02:00+00:00", "kind": "resumed", "step": 20, "message": "from step-20"},
        {"time": "2026-11-30T06:03:00+00:00", "kind": "warning", "step": 30, "message": "<b>blind</b> spot\nremedy: none"},
    ]
    config = {"run": {"name": None, "seed": 7}, "model": {"hidden_size": 64, "heads": 4}, "depth": {"mean": 5.0}}
    return write(folder, records, manifest=manifest(), config=config, events=events, evaluations=[evaluation()])
