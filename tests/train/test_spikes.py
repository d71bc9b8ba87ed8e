"""Loss spikes: the rule is the published one, depth does not count as one, and runs skip them or go back behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscale.train.spikes import find_spike
from tests.checkpoint.sealed import changed
from tests.conftest import Runs

UNHURRIED = settings(deadline=None)  # the machine may do something else too
WINDOW = 16
LOSS = st.integers(1, 10**6).map(lambda i: i / 2**10)  # sums and scaled values of these are exact


def at_depth(losses, depth=4):
    """Steps of one group."""
    return [[(depth, loss, 100)] for loss in losses]


@UNHURRIED
@given(st.lists(LOSS, min_size=WINDOW, max_size=WINDOW), LOSS, st.sampled_from([1.0, 3.5, 6.0]))
def test_at_a_fixed_depth_it_is_hampels_rule_on_the_losses(before, loss, threshold):
    middle = median(before)
    spread = 1.4826 * median(abs(b - middle) for b in before)
    found = find_spike([(4, loss, 100)], at_depth(before), threshold, WINDOW)
    assert (found is not None) == (spread > 0 and loss > middle + threshold * spread)
    if found:
        assert (found.excess, found.allowed) == pytest.approx((loss - middle, threshold * spread))


GROUP = st.tuples(st.integers(1, 12), LOSS, st.integers(1, 8).map(lambda i: 2**i))
STEPS = st.lists(st.lists(GROUP, min_size=1, max_size=3), min_size=WINDOW // 2, max_size=WINDOW)


@UNHURRIED
@given(STEPS, st.lists(GROUP, min_size=1, max_size=3), st.integers(-3, 3).map(lambda i: 2.0**i), LOSS, st.randoms())
def test_the_verdict_does_not_depend_on_units_levels_or_order(before, step, factor, shift, shuffler):
    def moved(groups):
        return [(depth, factor * loss + shift, tokens) for depth, loss, tokens in groups]

    shuffled = [shuffler.sample(b, len(b)) for b in shuffler.sample(before, len(before))]
    verdicts = [
        find_spike(step, before, 3.0, WINDOW),
        find_spike(moved(step), [moved(b) for b in before], 3.0, WINDOW),
        find_spike(shuffler.sample(step, len(step)), shuffled, 3.0, WINDOW),
    ]
    rounding = any(v and v.excess - v.allowed < 1e-6 for v in verdicts)
    assert rounding or len({v is None for v in verdicts}) == 1


@UNHURRIED
@given(STEPS, st.lists(GROUP, min_size=1, max_size=3))
def test_a_window_that_was_saved_as_json_gives_the_same_verdict(before, step):
    assert find_spike(step, json.loads(json.dumps(before)), 3.0, WINDOW) == find_spike(step, before, 3.0, WINDOW)


@UNHURRIED
@given(st.lists(LOSS, max_size=WINDOW // 2 - 1))
def test_nothing_is_a_spike_before_the_window_is_half_full(before):
    assert find_spike([(4, 1e9, 100)], at_depth(before), 6.0, WINDOW) is None


def loss_at(depth: int, noise: int) -> float:
    """A loss that falls with the depth, as that of a looped model does, and differs a little from step to step."""
    return 3 + 4 / depth + 0.01 * (noise % 5 - 2)


def test_a_shallow_step_is_no_spike_but_one_that_is_high_for_its_depth_is():
    depths = [1, 5, 6, 5, 7, 6, 5, 8] * 4  # depth 1 at every eighth step
    before = [[(depth, loss_at(depth, i), 100)] for i, depth in enumerate(depths)]
    losses = [group[0][1] for group in before]
    plain = median(losses) + 6 * 1.4826 * median(abs(loss - median(losses)) for loss in losses)
    assert loss_at(1, 0) > plain, "without regard to depth it would be one"
    assert find_spike([(1, loss_at(1, 0), 100)], before, 6.0, 32) is None
    for depth in (1, 5, 6, 7):
        assert find_spike([(depth, loss_at(depth, 0) + 1, 100)], before, 6.0, 32) is not None
    assert find_spike([(40, 9.0, 100)], before, 6.0, 32) is None, "a depth that was never seen is not judged"


def test_groups_count_by_their_tokens():
    before = [[(1, loss_at(1, i), 100), (5, loss_at(5, i // 5), 300)] for i in range(25)]
    found = find_spike([(1, loss_at(1, 2) + 4, 100), (5, loss_at(5, 2), 300)], before, 6.0, 25)
    assert found.excess == pytest.approx(4 * 100 / 400)


# ---- whole runs

SETTINGS = ["train.spike_window=8", "depth.prior=fixed", "train.steps=20"]
SPIKE = [96, 97, 98, 99]
"""Global samples whose loss is threefold: step 13 reads 96 to 103."""


def spiky(runs: Runs, name: str, samples, *overrides: str, **more) -> str:
    script, environment = str(Path(__file__).with_name("spiky_run.py")), {"SPIKY_SAMPLES": " ".join(map(str, samples))}
    return runs.train(name, *SETTINGS, *overrides, script=script, environment=environment, **more)


def events(runs: Runs, name: str, kind: str) -> list[str]:
    return [e["message"] for e in runs.journal(name) if e["kind"] == kind]


@pytest.mark.ranks
def test_a_spike_is_skipped_by_all_ranks_and_by_a_resumed_run_too(runs):
    """The spike is on rank 0's share alone. A run that goes on from step 10 has to remember the losses before."""
    every = ["train.spikes=skip", "checkpoint.every=1", "checkpoint.keep=20"]
    spiky(runs, "skips", SPIKE, *every, ranks=2)
    records = runs.records("skips")
    assert [r["skipped"] for r in records] == [0] * 12 + [1] * 8
    assert [r["step"] for r in records if r["grad_norm"] is None] == [13]
    before, after, next_one = (runs.weights("skips", step) for step in (12, 13, 14))
    assert all((before[n] == after[n]).all() for n in before)
    assert any((after[n] != next_one[n]).any() for n in after)
    (told,) = events(runs, "skips", "skipped")
    assert "loss spike" in told and "skipped on all (global samples 96 to 103" in told and "see skipped/step-13.json" in told

    kept = json.loads((runs.path("skips") / "skipped" / "step-13.json").read_text())
    assert kept["step"] == 13 and kept["samples"] == [96, 104] and kept["first_bad"] is None
    read = [m for rank in kept["ranks"] for m in rank["microbatches"]]
    assert sorted(s for m in read for s in m["samples"]) == list(range(96, 104))
    assert sum(m["terms"]["cross_entropy"] for m in read) == pytest.approx(records[12]["loss"], rel=1e-5)
    high = max(read, key=lambda m: m["terms"]["cross_entropy"])
    assert set(high["samples"]) & set(SPIKE)

    shutil.copytree(runs.path("skips"), runs.path("killed"))
    for step in range(11, 21):
        shutil.rmtree(runs.path("killed") / "checkpoints" / f"step-{step}")
    spiky(runs, "killed", SPIKE, *every, ranks=2, options=["--resume", "auto"])
    for key in ("loss", "grad_norm", "skipped", "tokens"):
        assert [r[key] for r in runs.records("killed")] == [r[key] for r in records], key


@pytest.mark.ranks
@pytest.mark.parametrize(("zero", "ranks"), [(1, 2), (0, 1)])
def test_a_run_goes_back_behind_a_spike_and_is_then_one_that_never_saw_its_samples(runs, zero, ranks):
    """From step 13 back to step 10, on with sample 104: to the last bit the run that a copy of that checkpoint becomes when
    its position in the corpus is moved there."""
    rewind = ["train.spikes=rewind", "checkpoint.keep=9", "corpus.workers=1", f"parallel.zero={zero}"]
    spiky(runs, "rewound", SPIKE, *rewind, ranks=ranks)
    records = runs.records("rewound")
    assert [r["step"] for r in records] == list(range(1, 21))
    assert [r["skipped"] for r in records] == [0] * 10 + [1] * 10
    (told,) = events(runs, "rewound", "rewound")
    assert "back to step 10, and on with other samples (global samples 96 to 103" in told

    at_step_10(runs, "rewound", "moved", consumed=104)
    runs.train("moved", *SETTINGS, *rewind, ranks=ranks, options=["--resume", "auto"])
    moved = runs.records("moved")
    for key in ("loss", "grad_norm", "tokens", "lr", "depths"):
        assert [r[key] for r in moved] == [r[key] for r in records], key
    ours, theirs = runs.weights("rewound", 20), runs.weights("moved", 20)
    assert all((ours[n] == theirs[n]).all() for n in ours)


@pytest.mark.ranks
def test_a_run_that_is_to_stop_at_a_spike_leaves_it_to_the_next_one(runs):
    """Its first step, 11, is the spike, and its time is up: there is nothing new to save. The run after it goes back, too."""
    rewind = ["train.spikes=rewind", "checkpoint.keep=9"]
    spiky(runs, "calm", [80], *rewind)
    at_step_10(runs, "calm", "stopped")
    spiky(runs, "stopped", [80], *rewind, "train.max_time=0.5", options=["--resume", "auto"], exit_code=75)
    assert [e["kind"] for e in runs.journal("stopped")][-2:] == ["rewound", "stopped"]
    assert [r["step"] for r in runs.records("stopped")] == list(range(1, 11))
    spiky(runs, "stopped", [80], *rewind, options=["--resume", "auto"])
    for key in ("loss", "grad_norm", "tokens", "skipped"):
        assert [r[key] for r in runs.records("stopped")] == [r[key] for r in runs.records("calm")], key


def at_step_10(runs: Runs, name: str, copy: str, **counters: int) -> None:
    """A copy of a run whose newest checkpoint is that of step 10."""
    shutil.copytree(runs.path(name), runs.path(copy))
    for step in (15, 20):
        shutil.rmtree(runs.path(copy) / "checkpoints" / f"step-{step}")
    with changed(runs.path(copy) / "checkpoints" / "step-10", "state.json") as state:
        state.update(counters)


@pytest.mark.ranks
def test_going_back_has_an_end(runs):
    """Every sample from 96 on is a spike. Where there is no checkpoint the steps are skipped instead."""
    output = spiky(runs, "endless", range(96, 400), "train.spikes=rewind", "train.bad_steps=3", exit_code=1)
    assert "3 steps in a row, up to step 11, had a loss spike" in output and "Traceback" not in output
    assert len(events(runs, "endless", "rewound")) == 2
    assert [r["step"] for r in runs.records("endless")] == list(range(1, 11))

    spiky(runs, "early", SPIKE, "train.spikes=rewind", "checkpoint.every=15")
    assert not events(runs, "early", "rewound") and len(events(runs, "early", "skipped")) == 1
