"""The learned law of the depths: against autograd and torch's Adam, and what its terms do."""

from __future__ import annotations

import json
import math
import random
import re
import shutil

import pytest
import torch

from loopscale.config import Config, load
from loopscale.config.tree import DepthConfig, ParallelConfig
from loopscale.depth import GroupSums, draw_depths, make_law, make_prior
from loopscale.depth.learned import LearnedLaw, Moving, Signal, softmax
from loopscale.errors import CheckpointError, UsageError
from loopscale.parallel.mesh import Mesh, sum_over_ranks
from loopscale.train.step import _same_on_all_ranks
from tests.ranks import RankError

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
    """By enumeration over four depths: the mean over draws of the gradient is ∂ Σ p_i f_i / ∂ℓ."""
    toy = law(cap=4, mean=2.5)
    values = [0.3, -0.8, 0.1, 0.4]
    p = softmax(toy.logits)
    expected = sum(chance * value for chance, value in zip(p, values, strict=True))
    found = [0.0] * 4
    for depth, chance in enumerate(p, 1):
        for i, g in enumerate(toy.feedback_gradient([depth], [values[depth - 1]])):
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


def test_left_out_each_group_is_compared_with_the_others():
    """A pull of w_j (c_j − mean of the others) g, by hand for three groups of unequal tokens, c from losses 1, 2 and 4."""
    compared, tokens, losses = law(baseline="leave_one_out", groups=3), (100, 200, 100), (1.0, 2.0, 4.0)
    groups = [GroupSums(depth, loss * n, n) for depth, loss, n in zip((2, 5, 9), losses, tokens, strict=True)]
    compared.update(groups)  # sets the moving moments, by which g is scaled
    scale = compared._own.loss.deviation / compared._own.score.deviation
    heard = []
    compared.feedback_gradient = lambda depths, pulls: heard.append((depths, pulls)) or [0.0] * 64
    compared.update(groups)
    a, b, c = (-math.exp(-loss) for loss in losses)
    others = ((2 * b + c) / 3, (a + c) / 2, (a + 2 * b) / 3)
    expected = [w * (score - other) * scale for w, score, other in zip((0.25, 0.5, 0.25), (a, b, c), others, strict=True)]
    assert heard[0][0] == [2, 5, 9] and heard[0][1] == pytest.approx(expected, rel=1e-12)


def test_a_budget_of_operations_holds_those_instead_of_the_mean():
    """With b = 3 a law that is pulled to depth 12 must pay for its tail at a third of a visit each, not at a whole one."""
    ends = {}
    for budget in ("visits", "flops"):
        held = law(budget=budget, backprop=3, cap=16, lr=0.02, entropy_coef=0.0)
        for number in range(2000):
            step(held, number, lambda depth: 3.0 + 0.2 * (depth not in (1, 12)))
        ends[budget] = held.at(0.0)

    def operations(prior) -> float:
        return math.fsum(p * (min(r, 3) + max(r - 3, 0) / 3) for r, p in enumerate(prior.probabilities, 1))

    start = make_prior(DepthConfig(prior="pln", cap=16))
    assert ends["visits"].mean == pytest.approx(5.0, abs=0.1)
    assert operations(ends["flops"]) == pytest.approx(operations(start), abs=0.1)
    assert ends["flops"].mean > 5.5 and operations(ends["visits"]) < operations(start) - 0.2


@pytest.mark.parametrize("ratio", [0.0, 0.1, 2.0])
def test_signal_and_noise_are_told_apart(ratio):
    """Gradients μ + noise of 20 numbers: ‖μ‖² / tr Σ is ``ratio``, on average over what the last hundred steps say."""
    source, signal, found = random.Random(3), Signal([0.0] * 20), []
    for _ in range(8000):
        signal.add([math.sqrt(ratio) + source.gauss(0, 1) for _ in range(20)])
        found.append(signal.to_noise)
    assert found[0] is None
    assert sum(found[500:]) / len(found[500:]) == pytest.approx(ratio, rel=0.05, abs=0.004)


def test_a_gradient_without_noise_is_told_as_no_ratio():
    signal = Signal([0.0])
    for _ in range(3):
        signal.add([1.0])
    assert signal.to_noise is None or signal.to_noise > 1e9


REPLAYED = {"one": (1, {}), "DP4": (4, {}), "PP2xDP2": (4, {"pipeline": 2}), "TP2xDP2": (4, {"tensor": 2})}


def replayed(mesh: Mesh, steps: int, corrupted: int | None) -> list[str]:
    """A law's digests as this rank hears recorded feedback: every reader tells its share of each group's sums, which are
    multiples of 2⁻²⁰, so that they add up alike in any order. At the end one rank's first logit is off by its last bit."""
    follower, source, digests = law(burn_in=8, lr=0.05), random.Random(11), list[str]()
    for number in range(steps):
        depths = draw_depths(follower.at(0.0), 1, number, 4)
        shares = [[round(source.uniform(2, 6) * 2**20) / 2**20 for _ in range(4)] for _ in range(4)]  # by group, by quarter
        own = range(mesh.data_rank, 4, mesh.data_size) if mesh.reads else ()
        told = [sum(shares[group][quarter] for quarter in own) for group in range(4)]
        sums = sum_over_ranks(torch.tensor(told, dtype=torch.float64))
        follower.update([GroupSums(depth, 64 * float(total), 256) for depth, total in zip(depths, sums, strict=True)])
        digests.append(follower.digest())
    if mesh.rank == corrupted:
        follower.logits[0] = math.nextafter(follower.logits[0], 0.0)
    _same_on_all_ranks("the law of the depths", follower.digest(), "; go on from the last checkpoint")
    return digests


@pytest.mark.ranks
def test_replayed_feedback_gives_the_same_law_to_the_bit_on_every_rank_of_every_layout(ranks):
    found = {
        name: ranks.run(replayed, size, 200, None, parallel=ParallelConfig(**layout)) for name, (size, layout) in REPLAYED.items()
    }
    (expected,) = found["one"]
    assert len(set(expected)) == 200
    for name, (size, _) in REPLAYED.items():
        assert found[name] == [expected] * size, name


@pytest.mark.ranks
def test_a_rank_whose_law_is_off_by_one_bit_is_found_and_named(ranks):
    with pytest.raises(RankError, match="the law of the depths on rank 2 is not that of rank 0; go on from the last checkpoint"):
        ranks.run(replayed, 4, 20, 2, parallel=ParallelConfig(pipeline=2))


@pytest.mark.ranks
def test_ranks_of_every_layout_learn_the_same_law_also_over_a_resume(runs):
    settings = ["depth.prior=learned", "depth.burn_in=4", "depth.lr=0.05", "depth.check_every=1", "checkpoint.every=10"]
    for name, (ranks, layout) in REPLAYED.items():
        runs.train(name, *settings, *(f"parallel.{key}={n}" for key, n in layout.items()), ranks=ranks)
    runs.train("moved", *settings, "parallel.pipeline=2", ranks=2)
    shutil.rmtree(runs.path("moved") / "checkpoints/step-20")
    runs.train("moved", *settings, options=["--resume", "auto"])  # from step 10, as one process
    expected = learned(runs, "one")
    assert max(abs(a - b) for a, b in zip(expected, law(mean=3, cap=8).logits, strict=True)) > 0.1
    for name in (*REPLAYED, "moved"):
        assert [r["depths"] for r in runs.records(name)] == [r["depths"] for r in runs.records("one")]
        assert learned(runs, name) == pytest.approx(expected, abs=1e-6)


@pytest.mark.ranks
def test_the_log_shows_the_law_that_comes_next(runs):
    runs.train("shown", "depth.prior=learned", "depth.burn_in=4", "depth.lr=0.05")
    first, *_, last = (record["prior"] for record in runs.records("shown"))
    assert first["probabilities"] == pytest.approx(law(mean=3, cap=8).at(0.0).probabilities, abs=1e-6)
    assert first["mean"] == pytest.approx(3.0, abs=1e-9) and "feedback_snr" not in first
    p = softmax(learned(runs, "shown"))
    assert last["probabilities"] == pytest.approx(p, abs=1e-6)
    assert last["entropy"] == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6) and last["feedback_snr"] >= 0


@pytest.mark.ranks
def test_a_learned_law_is_frozen_for_another_run_which_keeps_it_for_itself(runs):
    runs.train("source", "depth.prior=learned", "depth.burn_in=4", "depth.lr=0.05")
    table = f"depth.table={runs.path('source')}"
    runs.train("frozen", "depth.prior=table", table)
    p = softmax(learned(runs, "source"))
    for record in runs.records("frozen"):
        assert record["prior"]["probabilities"] == pytest.approx(p, abs=1e-5)
    shutil.rmtree(runs.path("source"))
    kept = load(Config, runs.path("frozen") / "config.yaml").config.depth.table
    assert kept == pytest.approx(p, abs=1e-5)


def learned(runs, name: str) -> list[float]:
    state = json.loads((runs.path(name) / "checkpoints/step-20/state.json").read_text())
    return state["law"]["logits"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda state: state.pop("score"), "the checkpoint's law is damaged: score is "),
        (lambda state: state.update(logits=["a"] * 64), "the checkpoint's law is damaged: logits.0 is 'a'"),
        (lambda state: state["logits"].__setitem__(3, math.nan), "the checkpoint's law is damaged: logits.3 is nan"),
        (lambda state: state.update(updates=-1), "the checkpoint's law is damaged: updates is -1"),
    ],
)
def test_a_state_that_is_none_is_told_in_a_sentence(damage, sentence):
    state = json.loads(json.dumps(law().state()))
    damage(state)
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        law().load(state)


def test_a_law_over_other_depths_is_refused_with_the_cap_that_it_keeps():
    with pytest.raises(UsageError, match=r"depths up to 8, and depth.cap is 64; a learned law keeps its cap: use depth.cap=8"):
        law().load(law(cap=8).state())
