"""Studies: arms × seeds over one configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopscale.config.study import load_study
from loopscale.errors import ConfigError

STUDY = """
config: run.yaml
set: [train.steps=30]
seeds: [1, 2]
arms:
  - {name: fixed-5, set: [depth.prior=fixed]}
  - {name: pln-5}
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "run.yaml").write_text("batch: {global_batch: 16}\ntrain: {steps: 500}\ndepth: {mean: 5}\n")
    (tmp_path / "prior.yaml").write_text(STUDY)
    return tmp_path / "prior.yaml"


def test_every_arm_runs_with_every_seed_a_seeds_runs_together(study):
    found = load_study(study, ["optimizer.lr=0.1"])
    assert [run.name for run in found.runs] == ["fixed-5-s1", "pln-5-s1", "fixed-5-s2", "pln-5-s2"]
    told = [
        (c.run.name, c.run.folder, c.run.seed, c.depth.prior, c.train.steps, c.optimizer.lr)
        for c in (r.loaded.config for r in found.runs)
    ]
    assert told == [
        (f"{arm}-s{seed}", "runs/prior", seed, prior, 30, 0.1)
        for seed in (1, 2)
        for arm, prior in (("fixed-5", "fixed"), ("pln-5", "pln"))
    ]


@pytest.mark.parametrize(
    ("before", "after", "key", "sentence"),
    [
        ("name: pln-5", "name: fixed-5", "arms", "two runs are called fixed-5-s1: an arm or a seed stands there twice"),
        ("depth.prior=fixed", "depth.prior=fixd", "depth.prior", "did you mean fixed?"),
        ("name: pln-5", "name: a/b", "arms[2].name", "must be text, matching"),
        ("seeds: [1, 2]", "seeds: []", "seeds", "is [], must be a list of"),
        ("depth.prior=fixed", "run.seed=9", "run.seed", "is the study's to give, by its arms and seeds"),
        ("set: [train.steps=30]", "set: [run.name=x]", "run.name", "is the study's to give, by its arms and seeds"),
        ("depth.prior=fixed", "run.folder=x", "run.folder", "is one for all arms; give it in the study's own set"),
        ("seeds: [1, 2]", "seeds: [1, 1]", "arms", "two runs are called fixed-5-s1"),
    ],
)
def test_a_mistake_is_told_with_its_key(study, before, after, key, sentence):
    study.write_text(STUDY.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_study(study)
    (problem,) = caught.value.problems
    assert problem.key == key and sentence in problem.sentence
    assert caught.value.source.startswith(str(study))


def test_runs_lie_where_it_is_asked_and_their_names_are_the_studys(study):
    assert load_study(study, ["run.folder=/scratch/my runs"]).folder == Path("/scratch/my runs/prior")
    with pytest.raises(ConfigError, match=r"run\.seed +is the study's to give"):
        load_study(study, ["run.seed=4"])
