"""A study made by hand, for the report's tests: three arms, three seeds, a law that moves in one of them."""

from __future__ import annotations

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
