"""A short campaign: every kind of fault once, on one to four ranks. The long one is run by hand, see ``campaign.py``."""

from __future__ import annotations

import pytest

from tests.faults.campaign import KINDS, Campaign, can_mount, draw

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, text_corpus) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), text_corpus)


@pytest.mark.parametrize("trial", draw(len(KINDS), seed=3), ids=lambda trial: trial.name)
def test_a_run_that_meets_a_fault_ends_as_if_there_had_been_none(campaign, trial, tmp_path):
    if trial.kind == "full-disk" and not can_mount(tmp_path):
        pytest.skip("a small disk cannot be mounted here (it needs root's rights)")
    outcome = campaign.run(trial)
    assert outcome.problems == []
    assert outcome.met


def test_trials_are_what_the_seed_says_and_reach_every_kind_and_size():
    trials = draw(90, seed=7)
    assert trials == draw(90, seed=7)
    assert {t.kind for t in trials} == set(KINDS)
    sizes = [t.size for t in trials]
    assert sizes.count(2) >= 20 and sizes.count(4) >= 8
