"""A study made by hand, for the report's tests: three arms, three seeds, a law that moves in one of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import TINY
from tests.report import run_folder

STEPS = 100
SEEDS = (1, 2, 3)
ARMS = {"fixed-3": ["depth.prior=fixed"], "pln-3": [], "learned": ["depth.prior=learned", "depth.entropy_coef=0.1"]}
NATS = {
    "fixed-3": {1: (5.0, 5.1, 5.2), 3: (4.0, 4.1, 4.2)},
    "pln-3": {1: (4.5, 4.6, 4.7), 3: (4.1, 4.2, 4.3)},
    "learned": {1: (4.6, 4.7, 4.8), 3: (3.9, 4.02, 4.08)},
}
"""Held-out loss at the end by depth, of each seed."""
BEGIN = [0.2, 0.5, 0.2, 0.1]
END = [0.1, 0.2, 0.6, 0.1]


def law(probabilities: list[float]) -> dict[str, Any]:
    mean = sum(depth * p for depth, p in enumerate(probabilities, 1))
    return {"mean": mean, "entropy": -sum(p * math.log(p) for p in probabilities if p), "probabilities": probabilities}


def law_of(arm: str, share: float) -> dict[str, Any]:
    """The law of an arm after a share of its steps."""
    if arm == "fixed-3":
        return law([0.0, 0.0, 1.0])
    moved = share if arm == "learned" else 0.0
    return law([round(p + moved * (q - p), 6) for p, q in zip(BEGIN, END, strict=True)])


def records(arm: str, seed: int, steps: int = STEPS, every: int = 10) -> list[dict[str, Any]]:
    """A run's records; its held-out loss falls by a nat, its state doubles in the arm that learns."""
    growth = 2.0 if arm == "learned" else 1.0
    found = []
    for step in range(every, steps + 1, every):
        share = step / STEPS
        losses = {str(depth): values[SEEDS.index(seed)] + 1 - share for depth, values in NATS[arm].items()}
        norm = math.sqrt(TINY["model"]["hidden_size"]) * growth ** ((step - every) / (STEPS - every))
        found.append(
            run_folder.record(step, 6.0 - share, prior=law_of(arm, share), state_norm=[1.0, norm])
            | ({"validation": losses} if step % 50 == 0 else {})
        )
    return found


def diagnosis(norm: float, counts: dict[int, int], radial: list[float] | None, **changes: Any) -> dict[str, Any]:
    """What a diagnosis at depth 3 says of scale; ``counts``: tokens by the quarter octave above 1 that their norm lies in."""
    bins = range(min(counts), max(counts) + 1)
    rows = [[sum(counts.values())] + [0] * (len(bins) - 1)] * 2 + [[counts.get(each, 0) for each in bins]]
    spread = {name: [1.0, 1.0, share * norm] for name, share in (("mean", 1.0), ("median", 0.8), ("p99", 2.0), ("max", 3.0))}
    return {
        "depth": 3,
        "norms": spread | {"std": [0.0] * 3, "edges": [2 ** (each / 4) for each in (*bins, bins.stop)], "counts": rows},
        **({} if radial is None else {"radial_fraction": radial}),
        "loss": 4.0,
        "token_correlation": 0.5,
    } | changes


def exits(loss: float, rate: float, **changes: Any) -> dict[str, Any]:
    """An evaluation of exits whose three depths have losses falling by half a nat to ``loss``, and ``rate`` / depth tokens/s."""
    points = [{"depth": r, "loss": loss + (3 - r) / 2, "tokens_per_second": rate / r} for r in (1, 2, 3)]
    margin = {"threshold": 0.3, "loss": loss, "tokens_per_second": rate / 2, "mean_loops": 2.0, "exits": [0.25, 0.5, 0.25]}
    return {
        "created": "2026-11-30T06:20:00+00:00",
        "checkpoint": f"step-{STEPS}",
        "source": "validation split of data/sotu",
        "protocol": "batches of 16, fp32",
        "depth": 3,
        "target": 1.01,
        "calibration": {"sequences": 4, "tokens": 124},
        "measured": {"sequences": 8, "tokens": 248},
        "fixed": points,
        "rules": {"margin": margin},
    } | changes


def write_exits(run: Path, evaluation: dict[str, Any]) -> None:
    (run / "evaluations" / f"{evaluation['checkpoint']}-exits.json").write_text(json.dumps(evaluation))


def study_file(folder: Path, arms: dict[str, list[str]] | None = None, seeds: tuple[int, ...] = SEEDS) -> Path:
    """Writes the study and the configuration that it is over."""
    config = TINY | {"run": {"folder": str(folder / "runs")}, "train": TINY["train"] | {"steps": STEPS}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    listed = [{"name": name, "set": changes} for name, changes in (ARMS if arms is None else arms).items()]
    path = folder / "prior.yaml"
    path.write_text(yaml.safe_dump({"config": "run.yaml", "seeds": list(seeds), "arms": listed}, sort_keys=False))
    return path


def write_run(folder: Path, arm: str, seed: int, told: list[dict[str, Any]] | None = None, **files: Any) -> Path:
    """One run of the study in ``folder``."""
    told = records(arm, seed) if told is None else told
    manifest = run_folder.manifest(name=f"{arm}-s{seed}", seed=seed)
    return run_folder.write(folder / "runs" / "prior" / f"{arm}-s{seed}", told, **{"manifest": manifest} | files)


def whole(folder: Path) -> Path:
    """A study all of whose runs have finished; its file."""
    for arm in ARMS:
        for seed in SEEDS:
            write_run(folder, arm, seed)
    return study_file(folder)
