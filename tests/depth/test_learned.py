"""The learned law of the depths: against autograd and torch's Adam, and what its terms do."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest
import torch

from loopscale.config.tree import DepthConfig
from loopscale.depth import GroupSums, draw_depths, make_law, make_prior
from loopscale.depth.learned import LearnedLaw, Moving, softmax

TOKENS = (700, 300)


def law(**changed: object) -> LearnedLaw:
    made = make_law(DepthConfig(**{"prior": "learned", "burn_in": 0, **changed}))
    assert isinstance(made, LearnedLaw)
    return made


def step(law: LearnedLaw, number: int, loss_of) -> None:
    """One step of two groups with drawn depths, whose loss per token is ``loss_of(depth)``."""
    depths = draw_depths(law.at(0.0), 1, number, len(TOKENS))
    law.update([GroupSums(depth, loss_of(depth) * tokens, tokens) for depth, tokens in zip(depths, TOKENS, strict=True)])


def test_it_begins_as_pln():
    assert law().at(0.0).probabilities == pytest.approx(make_prior(DepthConfig(prior="pln")).probabilities, abs=1e-15)
    assert law().at(0.0).mean == pytest.approx(5.0, abs=1e-9) and law().at(0.0).entropy == pytest.approx(2.348, abs=1e-3)


def test_updates_are_those_of_autograd_and_torchs_adam():
    """The objective as Paper B writes it, on 30 steps of random feedback."""
    ours = law(cap=12, entropy_coef=0.05, lr=0.02, burn_in=3)
    logits = torch.tensor(ours.logits, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    source, heard = random.Random(7), []
    for _ in range(30):
        depths = [source.randint(1, 12) for _ in range(4)]
        tokens = [source.randint(50, 100) for _ in depths]
        losses = [3.0 - 0.1 * depth + source.gauss(0, 0.2) for depth in depths]
        weights = torch.tensor(tokens, dtype=torch.float64) / sum(tokens)
        if len(heard) >= 3:
            scale, centre = max(heard[-1][0][1], 1e-24) ** 0.5 / max(heard[-1][1][1], 1e-24) ** 0.5, heard[-1][1][0]
            advantage = torch.tensor([(-math.exp(-loss) - centre) * scale for loss in losses], dtype=torch.float64)
            logs = torch.log_softmax(logits, 0)
            mean = (logs.exp() * torch.arange(1, 13)).sum()
            drawn = logs[[depth - 1 for depth in depths]]
            objective = (weights * advantage * drawn).sum() + (mean - 5) ** 2 + 0.05 * (logs.exp() * logs).sum()
            adam.zero_grad()
            objective.backward()
            adam.step()
        state = []
        for n, values in enumerate((losses, [-math.exp(-loss) for loss in losses])):
            x = torch.tensor(values, dtype=torch.float64)
            seen = float((weights * x).sum())
            within = float((weights * (x - seen) ** 2).sum())
            if heard:
                old_mean, old = heard[-1][n]
                state.append((0.95 * old_mean + 0.05 * seen, 0.95 * old + 0.05 * within + 0.95 * 0.05 * (seen - old_mean) ** 2))
            else:
                state.append((seen, within))
        heard.append(state)
        ours.update([GroupSums(d, loss * t, t) for d, loss, t in zip(depths, losses, tokens, strict=True)])
        assert ours.logits == pytest.approx(logits.tolist(), abs=1e-11)


def test_the_surrogates_gradient_is_that_of_the_expected_score():
    """By enumeration over four depths: the mean over draws of the gradient, without the other terms, is ∂ Σ p_i f_i / ∂ℓ."""
    toy = law(cap=4, mean=2.5, entropy_coef=0.0, budget_coef=0.0)
    values = [0.3, -0.8, 0.1, 0.4]
    p = softmax(toy.logits)
    expected = sum(chance * value for chance, value in zip(p, values, strict=True))
    found = [0.0] * 4
    for depth, chance in enumerate(p, 1):
        for i, g in enumerate(toy.gradient([depth], [values[depth - 1]])):
            found[i] += chance * g
    assert found == pytest.approx([chance * (value - expected) for chance, value in zip(p, values, strict=True)], abs=1e-15)


def test_nothing_moves_in_the_burn_in_and_then_at_once():
    watched = law(burn_in=32)
    before = list(watched.logits)
    for number in range(32):
        step(watched, number, lambda depth: 3 + 1 / depth)
    assert watched.logits == before
    step(watched, 32, lambda depth: 3 + 1 / depth)
    assert watched.logits != before


def test_a_constant_loss_keeps_the_mean_and_raises_the_entropy():
    flat = law(entropy_coef=0.1, lr=0.01)
    entropy = flat.at(0.0).entropy
    for number in range(2000):
        step(flat, number, lambda depth: 3.0)
    assert flat.at(0.0).mean == pytest.approx(5.0, abs=0.05)
    assert flat.at(0.0).entropy > entropy + 0.1


@pytest.mark.parametrize("best", [3, 5, 7])
def test_a_planted_best_depth_gains_mass(best):
    drawn = law(entropy_coef=0.0, lr=0.01)
    before = drawn.at(0.0).probabilities[best - 1]
    for number in range(1500):
        step(drawn, number, lambda depth: 3.0 + 0.3 * (depth != best))
    assert drawn.at(0.0).probabilities[best - 1] > before + 0.1


def test_more_entropy_takes_mass_from_the_best_depth_and_leaves_the_mean():
    """Paper B's sweep: 0 to 0.1."""
    ends = {}
    for coefficient in (0.0, 0.03, 0.1):
        drawn = law(entropy_coef=coefficient, lr=0.01)
        for number in range(2000):
            step(drawn, number, lambda depth: 3.0 + 0.02 * abs(depth - 5))
        ends[coefficient] = drawn.at(0.0)
    assert ends[0.0].probabilities[4] > ends[0.03].probabilities[4] > ends[0.1].probabilities[4]
    assert all(end.mean == pytest.approx(5.0, abs=0.1) for end in ends.values())


def test_its_state_goes_through_a_checkpoint_to_the_bit():
    straight, resumed = law(burn_in=4), law(burn_in=4)
    for number in range(20):
        step(straight, number, lambda depth: 3 + 1 / depth)
        step(resumed, number, lambda depth: 3 + 1 / depth)
        again = law(burn_in=4)
        again.load(json.loads(json.dumps(resumed.state())))
        resumed = again
        assert resumed.digest() == straight.digest()
    fresh = law(burn_in=4)
    fresh.load({})
    assert fresh.digest() == law(burn_in=4).digest() != straight.digest()


def test_the_moving_variance_is_that_of_all_that_was_seen_when_it_is_stationary():
    moving, source = Moving(), random.Random(1)
    found = []
    for _ in range(5000):
        moving.add([source.gauss(2.0, 3.0), source.gauss(2.0, 3.0)], [0.5, 0.5])
        found.append(moving.variance)
    assert sum(found[200:]) / len(found[200:]) == pytest.approx(9.0, rel=0.05)


def test_a_step_without_scored_tokens_teaches_nothing():
    quiet = law()
    before = quiet.digest()
    quiet.update([GroupSums(3, 0.0, 0)])
    assert quiet.digest() == before


@pytest.mark.ranks
def test_ranks_of_every_layout_learn_the_same_law_also_over_a_resume(runs):
    settings = ["depth.prior=learned", "depth.burn_in=4", "depth.lr=0.05", "depth.check_every=1", "checkpoint.every=10"]
    layouts = {"one": (1, []), "PP2": (2, ["parallel.pipeline=2"]), "DP2": (2, []), "TP2": (2, ["parallel.tensor=2"])}
    for name, (ranks, layout) in layouts.items():
        runs.train(name, *settings, *layout, ranks=ranks)
    runs.train("moved", *settings, "parallel.pipeline=2", ranks=2)
    shutil.rmtree(runs.path("moved") / "checkpoints/step-20")
    runs.train("moved", *settings, options=["--resume", "auto"])  # from step 10, as one process
    expected = learned(runs, "one")
    assert max(abs(a - b) for a, b in zip(expected, law(mean=3, cap=8).logits, strict=True)) > 0.1
    for name in (*layouts, "moved"):
        assert [r["depths"] for r in runs.records(name)] == [r["depths"] for r in runs.records("one")]
        assert learned(runs, name) == pytest.approx(expected, abs=1e-6)


def learned(runs, name: str) -> list[float]:
    state = json.loads((runs.path(name) / "checkpoints/step-20/state.json").read_text())
    return state["law"]["logits"]
