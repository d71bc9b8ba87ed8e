"""Saved at any layout, loaded at any other: the next steps, and every bit that is loaded, are the undisturbed run's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import read_index
from loopscale.config import Config, settle
from loopscale.config.tree import ParallelConfig
from loopscale.model.flops import count
from loopscale.model.ring import Ring
from loopscale.parallel.mesh import Mesh
from loopscale.train import snapshot
from loopscale.train.snapshot import Progress
from loopscale.train.step import TrainStep
from tests.parallel.test_layouts import LENGTH, Case, configuration, step_batch

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "one": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "DP2-ZeRO0": (2, {"zero": 0}),
    "DP2-ZeRO1": (2, {}),
    "DP2-offload": (2, {"offload_optimizer": True}),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}),
    "PP2xDP2": (4, {"pipeline": 2}),
}
SAVED_AT, STEPS = 3, 8


def config_at(layout: str) -> Config:
    config = configuration(Case("TP2", "fixedpoint", "drawn", "last", "terminal", False))
    train = config.train.model_copy(update={"steps": STEPS})
    return config.model_copy(update={"train": train, "parallel": ParallelConfig(**LAYOUTS[layout][1])})


def trainer(mesh: Mesh, config: Config) -> TrainStep:
    batch = settle(config.batch, config.depth.groups, mesh.data_size)
    return TrainStep(config, batch, Ring.of(config, count(config.model, LENGTH)), mesh)


def save(mesh: Mesh, train: TrainStep, folder: Path, step: int) -> None:
    state = asdict(Progress(step=step)) | {"applied_steps": train.optimizer.applied_steps}
    state |= {"law": train.law.state(), "corpus": "", "global_batch": train.batch.global_batch}
    pieces = snapshot.own(train.stage, train.optimizer, mesh)
    store.save(Folder(folder), store.Snapshot(step, pieces, state, {"config.yaml": ""}))


def losses(mesh: Mesh, train: TrainStep, begin: int, end: int) -> list[float]:
    config = train.config
    return [train(step, step_batch(config, step, mesh.data_rank, mesh.data_size)).loss for step in range(begin, end)]


def undisturbed(mesh: Mesh, config: Config, folder: Path) -> list[float]:
    """Losses of the steps after the one that is saved, and at the end a second checkpoint."""
    train = trainer(mesh, config)
    losses(mesh, train, 0, SAVED_AT)
    save(mesh, train, folder, SAVED_AT)
    found = losses(mesh, train, SAVED_AT, STEPS)
    save(mesh, train, folder, STEPS)
    return found


def gone_on(mesh: Mesh, config: Config, sources: dict[str, Path], root: Path) -> dict[str, list[float]]:
    """The same from each of ``sources``; what was loaded is saved again before anything else."""
    found = {}
    for name, source in sources.items():
        train = trainer(mesh, config)
        snapshot.restore(source / f"step-{SAVED_AT}", train.stage, train.optimizer, mesh)
        save(mesh, train, root / name, SAVED_AT)
        found[name] = losses(mesh, train, SAVED_AT, STEPS)
        save(mesh, train, root / name, STEPS)
    return found


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> dict[str, tuple[Path, list[float]]]:
    """By layout: a run's checkpoints and the losses after the first of them."""
    root, found = tmp_path_factory.mktemp("saved"), {}
    for layout, (size, _) in LAYOUTS.items():
        config = config_at(layout)
        found[layout] = (root / layout, ranks.run(undisturbed, size, config, root / layout, parallel=config.parallel)[0])
    return found


def digests(checkpoint: Path) -> dict[str, str]:
    return {name: tensor.digest for name, tensor in read_index(checkpoint).items()}


@pytest.mark.parametrize("to", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(ranks, saved, tmp_path, to):
    """All ordered pairs: weights and moments are equal to the bit, and the next five losses to 1e-5; at the same layout these,
    and all that is saved after them, to the bit too."""
    config, expected = config_at(to), saved["one"][1]
    sources = {name: folder for name, (folder, _) in saved.items()}
    found = ranks.run(gone_on, LAYOUTS[to][0], config, sources, tmp_path, parallel=config.parallel, timeout=300)[0]
    for source, (folder, own) in saved.items():
        place = tmp_path / source
        assert digests(place / f"step-{SAVED_AT}") == digests(folder / f"step-{SAVED_AT}"), source
        assert found[source] == pytest.approx(expected, rel=1e-5), source
        if source == to:
            assert found[source] == own
            assert digests(place / f"step-{STEPS}") == digests(folder / f"step-{STEPS}")


def test_every_rank_writes_a_part_and_moments_are_not_zero(saved):
    for layout, (size, _) in LAYOUTS.items():
        checkpoint = saved[layout][0] / f"step-{STEPS}"
        index = read_index(checkpoint)
        assert {box.file[:10] for tensor in index.values() for box in tensor.boxes} == {f"rank-{r:05d}" for r in range(size)}
        kinds = {
            kind: {n.partition("/")[2] for n in index if n.startswith(f"{kind}/")} for kind in ("weight", "exp_avg", "exp_avg_sq")
        }
        assert kinds["weight"] == kinds["exp_avg"] == kinds["exp_avg_sq"]
        assert all(t.any() for name, t in store.load_whole(checkpoint).items() if name.startswith("exp_avg_sq/"))
        sizes = [p.stat().st_size for p in (checkpoint / "tensors").glob("rank-*")]
        assert layout.startswith(("one", "PP", "TP")) or max(sizes) < 1.05 * min(sizes)
