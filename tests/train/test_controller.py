"""What a depth controller hears, on real ranks: the same on all of them, and at every layout."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from loopscale.checkpoint import store
from loopscale.config import settle
from loopscale.config.tree import ParallelConfig
from loopscale.depth import GroupSums, Prior
from loopscale.depth.priors import table
from loopscale.errors import ClusterError
from loopscale.model.flops import count
from loopscale.model.ring import Ring
from loopscale.parallel.mesh import Mesh
from loopscale.train.step import TrainStep
from tests.parallel.test_layouts import LENGTH, STEPS, Case, configuration, step_batch

pytestmark = pytest.mark.ranks
CAP = 5


class Drift:
    """A trivial controller: every depth gains the loss per token that it met."""

    def __init__(self) -> None:
        self.weights, self.heard = [1.0] * CAP, list[tuple[GroupSums, ...]]()

    def at(self, progress: float) -> Prior:
        return table(self.weights, CAP)

    def update(self, groups) -> None:
        self.heard.append(tuple(groups))
        for group in groups:
            self.weights[group.depth - 1] += group.loss / group.tokens

    def figures(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, list[float]]:
        return {"weights": list(self.weights)}

    def load(self, state) -> None:
        self.weights = list(state["weights"])

    def digest(self) -> str:
        return hashlib.sha256(repr(self.weights).encode()).hexdigest()


def heard(mesh: Mesh, config, corrupted: int | None = None) -> tuple[str, list[tuple[GroupSums, ...]]]:
    """(digest, what was told) of a run; the controller of rank ``corrupted`` goes astray after the second step."""
    batch = settle(config.batch, config.depth.groups, mesh.data_size)
    train = TrainStep(config, batch, Ring.of(config, count(config.model, LENGTH)), mesh)
    train.law = law = Drift()
    for step in range(STEPS):
        train(step, step_batch(config, step, mesh.data_rank, mesh.data_size))
        if step == 1 and mesh.rank == corrupted:
            law.weights[0] += 1e-12
    return law.digest(), law.heard


def astray(mesh: Mesh, config, corrupted: int) -> str:
    with pytest.raises(ClusterError) as caught:
        heard(mesh, config, corrupted)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["PP2", "TP2", "PP2xDP2", "TP2xDP2"])
def test_all_ranks_hear_the_sums_of_one_process_and_draw_the_same_depths(mesh, ranks, layout):
    case = Case(layout, "fixedpoint", "drawn", "last", "terminal", False)
    config = configuration(case)
    _, expected = heard(mesh, config.model_copy(update={"parallel": ParallelConfig()}))
    answers = ranks.run(heard, case.ranks, config, parallel=config.parallel)
    assert len({digest for digest, _ in answers}) == 1
    assert len({group.depth for groups in expected for group in groups}) > 1
    for _, found in answers:
        assert [[(g.depth, g.tokens) for g in groups] for groups in found] == [
            [(g.depth, g.tokens) for g in groups] for groups in expected
        ]
        for ours, theirs in zip(found, expected, strict=True):
            assert [g.loss for g in ours] == pytest.approx([g.loss for g in theirs], rel=1e-6)


def test_what_a_law_has_learned_is_in_checkpoints(runs):
    """Killed and started again at another layout, a run draws the depths of the undisturbed one: they depend on every loss."""
    learning = {"script": str(Path(__file__).with_name("drifting_law.py"))}
    runs.train("calm", **learning)
    with runs.start("killed", "train.steps=12", **learning) as job:
        job.wait_for_steps(11)
        job.ranks[0].kill()
        job.wait_for_end()
    runs.train("killed", "parallel.pipeline=2", ranks=2, options=["--resume", "auto"], **learning)
    calm, killed = runs.records("calm"), runs.records("killed")
    assert len({depth for record in calm[10:] for depth in record["depths"]}) > 1
    assert [r["depths"] for r in killed] == [r["depths"] for r in calm]
    assert [r["loss"] for r in killed] == pytest.approx([r["loss"] for r in calm], rel=1e-5)
    learned = store.load_state(runs.path("calm") / "checkpoints" / "step-20")["law"]["weights"]
    assert max(learned) > 10 * min(learned)


@pytest.mark.parametrize("layout", ["PP2xDP2", "TP2xDP2"])
def test_a_rank_whose_law_went_astray_is_found_and_named(ranks, layout):
    config = configuration(Case(layout, "fixedpoint", "drawn", "last", "terminal", False))
    config = config.model_copy(update={"depth": config.depth.model_copy(update={"check_every": 1})})
    said = ranks.run(astray, 4, config, 2, parallel=config.parallel)
    assert said == ["the law of the depths on rank 2 is not that of rank 0; go on from the last checkpoint"] * 4
