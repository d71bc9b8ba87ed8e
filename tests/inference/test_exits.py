"""Early exit: scores by hand, a shrinking batch that gives what the whole one gives, thresholds that keep their promise."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopscale.config.tree import ModelConfig
from loopscale.inference.exits import NEVER, Rule, Visited, calibrate, leave_at, look, losses_of, rules, run
from loopscale.model.inputs import Documents, Inputs

V, S, K = 53, 12, 4
SIZES = {"vocab_size": V, "hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_size": 40, "init_std": 0.2}
BARE = {"inject": "none", "state_init": "embedding", "prelude_layers": 0, "core_layers": 2, "coda_layers": 0}
SHAPES = {
    "fixedpoint, final_only": {"readout": "final_only"},
    "embedding, parcae": {"state_init": "embedding", "inject": "parcae", "value_embeddings": True, "coda_linear": True},
    "ouro": {**BARE, "layer_norm": "branch", "between": "shared", "exit_gate": "normed"},
    "blindspot": {**BARE, "positions": "learned", "tied_head": True, "readout": "raw", "exit_gate": "raw"},
}
STARTS = [[0], [0, 5, 9], [0], [0, 1], [0, 11], [0, 3]]
SAMPLES = [11, 4, 90, 5, 2, 60]


def build(shape: str):
    from loopscale.model.stage import LoopedStage

    return LoopedStage(ModelConfig(**SIZES, **SHAPES[shape]), S, seed=3)


def example() -> Inputs:
    tokens = torch.randint(V, (len(STARTS), S + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[1, [4, 8]] = targets[3, 0] = -100
    flat = [row * S + start for row, own in enumerate(STARTS) for start in own]
    boundaries = torch.tensor([*flat, len(STARTS) * S], dtype=torch.int32)
    documents = Documents(boundaries, len(STARTS), S)
    return Inputs(tokens[:, :-1], targets, documents, torch.tensor(SAMPLES), purpose="evaluation", final_visit=K)


@torch.no_grad()
def whole(stage, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """States and logits of the whole batch after every visit."""
    feed, states, logits = stage.prelude(inputs), [], []
    for r in range(1, K + 1):
        states.append(stage.visit(inputs, feed, states[-1] if states else None, r))
        logits.append(stage.logits(stage.decode(inputs, states[-1], r)))
    return states, logits


# ---- scores


TOY = SimpleNamespace(decode=lambda inputs, h, visit: h, logits=lambda h: h, gate_logits=lambda h: h)
"""A stage whose states are its logits."""


def scores_of(name: str, states: list[list]) -> list[list[float]]:
    score, memory, found = rules(ModelConfig(exit_gate="raw"))[name], None, []
    for visit, state in enumerate(states, 1):
        scores, memory = score(Visited(TOY, None, torch.tensor(state, dtype=torch.float64), visit), memory)
        found.append(scores.tolist())
    return found


def test_margin_by_hand():
    """Two tokens of two sequences: (3 − 1 + 5 − 4.5) / 2 and (2 − 2 + 7 − 0) / 2."""
    logits = [[[1.0, 3.0, 0.0], [2.0, -1.0, 2.0]], [[5.0, 4.5, -9.0], [-1.0, 0.0, 7.0]]]
    assert scores_of("margin", [logits]) == [pytest.approx([1.25, 3.5])]


def test_kl_by_hand():
    """From (1/2, 1/2) to (3/4, 1/4): 3/4 ln 3/2 + 1/4 ln 1/2 = 0.13081 nats, and the other token stays."""
    first = [[[math.log(1 / 2), math.log(1 / 2)]], [[2.0, 5.0]]]
    second = [[[math.log(3 / 4), math.log(1 / 4)]], [[1.0, 4.0]]]
    assert scores_of("kl", [first, second, second]) == [
        [-math.inf],
        pytest.approx([-0.130812 / 2], rel=1e-5),
        pytest.approx([0.0], abs=1e-12),
    ]


def test_gate_by_hand():
    """λ of one token 1/2 and 3/4, of the other 1/4 and 1/2: it has left by 1/2 and 7/8, and by 1/4 and 5/8."""
    found = scores_of("gate", [[[0.0], [-math.log(3)]], [[math.log(3)], [0.0]]])
    assert found == [pytest.approx([(1 / 2 + 1 / 4) / 2]), pytest.approx([(7 / 8 + 5 / 8) / 2])]


def test_only_a_model_with_a_gate_has_its_rule():
    assert list(rules(ModelConfig())) == ["margin", "kl"]
    assert list(rules(ModelConfig(exit_gate="normed"))) == ["margin", "kl", "gate"]


# ---- a batch that shrinks


@pytest.mark.parametrize("plan", [[2, 4, 1, 4, 2, 3], [1, 1, 1, 1, 1, 1], [4, 4, 4, 4, 4, 4], [3, 3, 2, 3, 3, 3]])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_sequence_leaves_with_what_the_whole_batch_gives_it_there(mesh, shape, plan):
    stage, inputs = build(shape), example()
    _, logits = whole(stage, inputs)
    when = dict(zip(SAMPLES, plan, strict=True))

    def as_planned(now: Visited, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Remembers which samples are still there."""
        samples = now.inputs.samples
        assert memory is None or torch.equal(memory[0], samples)
        assert now.state.shape[1] == len(now.inputs.tokens) == len(samples)
        return torch.tensor([float(when[s] == now.visit) for s in samples.tolist()]), samples[None]

    left = list(run(stage, inputs, K, Rule(as_planned, 0.5)))
    assert [part.visit for part in left] == sorted(set(plan))
    assert {int(row): part.visit for part in left for row in part.rows} == dict(enumerate(plan))
    for part in left:
        torch.testing.assert_close(part.logits, logits[part.visit - 1][:, part.rows], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("depth", [1, 3])
def test_without_a_rule_all_leave_at_the_end(mesh, depth):
    stage, inputs = build("fixedpoint, final_only"), example()
    _, logits = whole(stage, inputs)
    (left,) = run(stage, inputs, depth)
    assert (left.visit, left.rows.tolist()) == (depth, [0, 1, 2, 3, 4, 5])
    assert torch.equal(left.logits, logits[depth - 1])


@pytest.mark.parametrize(
    ("shape", "name"), [(shape, name) for shape, own in SHAPES.items() for name in rules(ModelConfig(**own))]
)
def test_rules_leave_where_the_scores_of_the_whole_batch_say(mesh, shape, name):
    """Scores are written out here once more; the threshold lies in the middle of them, between two."""
    stage, inputs = build(shape), example()
    states, logits = whole(stage, inputs)
    p = [x.double().softmax(-1) for x in logits]
    if name == "margin":
        expected = [(x.sort(-1).values[..., -1] - x.sort(-1).values[..., -2]).mean(0).double() for x in logits[:-1]]
    elif name == "kl":
        expected = [(b * (a / b).log()).sum(-1).mean(0) for a, b in itertools.pairwise(p[:-1])]
        expected = [torch.full((len(STARTS),), -math.inf, dtype=torch.float64), *expected]
    else:
        leave = torch.stack([torch.sigmoid(stage.gate_logits(h)).detach().double() for h in states[:-1]])
        expected = list(1 - (1 - leave).cumprod(0).mean(1))
    losses, scores = look(stage, inputs, K, {name: rules(stage.model)[name]})
    torch.testing.assert_close(scores[name], torch.stack(expected), atol=1e-5, rtol=1e-5)
    known = torch.stack(expected)[torch.stack(expected).isfinite()].sort().values
    threshold = float(known[len(known) // 2 - 1 : len(known) // 2 + 1].mean())
    visits = {row: next((r for r in range(1, K) if expected[r - 1][row] >= threshold), K) for row in range(len(STARTS))}
    assert len(set(visits.values())) > 1
    for part in run(stage, inputs, K, Rule(rules(stage.model)[name], threshold)):
        assert {visits[int(row)] for row in part.rows} == {part.visit}
        found = losses_of(part.logits, inputs.targets[part.rows])
        torch.testing.assert_close(found, losses[part.visit - 1, part.rows], atol=1e-5, rtol=1e-6)


def test_losses_are_sums_over_the_scored_tokens_of_a_sequence(mesh):
    stage, inputs = build("fixedpoint, final_only"), example()
    _, logits = whole(stage, inputs)
    losses, _ = look(stage, inputs, K, {})
    for row, targets in enumerate(inputs.targets):
        expected = F.cross_entropy(logits[1][:, row][targets >= 0].double(), targets[targets >= 0], reduction="sum")
        assert losses[1, row].item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(("name", "decoded"), [("margin", 6 + 4 + 2), ("kl", 6 + 4 + 2), ("gate", 6)])
def test_what_has_left_is_neither_visited_nor_decoded(mesh, monkeypatch, name, decoded):
    """Two of six leave after each of the three visits; the gate needs no logits of those that stay."""
    stage, counts = build("ouro"), {"visit": 0, "decode": 0}
    for method in counts:
        whole_method = getattr(stage, method)

        def counted(inputs, *rest, _method=method, _whole=whole_method):
            counts[_method] += len(inputs.tokens)
            return _whole(inputs, *rest)

        monkeypatch.setattr(stage, method, counted)
    score = rules(stage.model)[name]

    def two_at_a_time(now: Visited, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scores, memory = score(now, memory)
        return (torch.arange(len(scores)) < 2).float(), memory

    assert [len(part.rows) for part in run(stage, example(), 3, Rule(two_at_a_time, 0.5))] == [2, 2, 2]
    assert counts == {"visit": 6 + 4 + 2, "decode": decoded}


# ---- thresholds


def test_sequences_leave_at_the_first_score_that_reaches_the_threshold():
    scores = torch.tensor([[0.1, 0.9, math.nan, 0.5], [0.5, 0.2, 0.3, math.nan]])
    assert leave_at(scores, 0.5).tolist() == [2, 1, 3, 1]
    assert leave_at(scores, NEVER).tolist() == [3, 3, 3, 3]


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_the_threshold_lets_those_leave_who_lose_nothing():
    """Four tokens may lose 4 ln 1.01 = 0.0398 nats together: the two of high scores leave at once, a third would lose 8."""
    losses = doubles([1.0, 1.01, 9.0, 9.0], [1.0, 1.0, 1.0, 1.0])
    threshold = calibrate(doubles([4.0, 3.0, 2.0, 1.0]), losses, tokens=4)
    assert 2 < threshold <= 3
    losses[0, 1] = 1.05  # and one more lets only the first leave
    assert 3 < calibrate(doubles([4.0, 3.0, 2.0, 1.0]), losses, tokens=4) <= 4
    assert calibrate(doubles([4.0, 3.0, 2.0, 1.0]), losses + doubles([1.0] * 4, [0.0] * 4), tokens=4) == NEVER


@pytest.mark.parametrize("score", [-math.inf, math.nan])
def test_without_scores_nobody_leaves_early(score):
    assert calibrate(doubles([score] * 3), doubles([1.0] * 3, [1.0] * 3), tokens=3) == NEVER


numbers = st.floats(-8, 8, width=32)


@st.composite
def measured(draw) -> tuple[Tensor, Tensor]:
    """Scores [K − 1, N] and losses [K, N]."""
    visits, sequences = draw(st.integers(2, 5)), draw(st.integers(1, 7))
    scores = draw(st.lists(st.lists(numbers, min_size=sequences, max_size=sequences), min_size=visits - 1, max_size=visits - 1))
    each = st.lists(st.floats(0, 4, width=32), min_size=sequences, max_size=sequences)
    return doubles(*scores), doubles(*draw(st.lists(each, min_size=visits, max_size=visits)))


@given(measured(), numbers, numbers)
def test_a_higher_threshold_lets_nobody_leave_earlier(case, one, other):
    scores, _ = case
    assert (leave_at(scores, min(one, other)) <= leave_at(scores, max(one, other))).all()


@settings(deadline=None)
@given(measured(), st.integers(1, 40), st.sampled_from([1.0, 1.01, 1.5]))
def test_the_chosen_threshold_is_the_fastest_that_meets_the_target(case, tokens, target):
    scores, losses = case
    visits, sequences = losses.shape

    def outcome(threshold: float) -> tuple[float, float]:
        """Mean visits and perplexity."""
        at = [next((r for r in range(visits - 1) if scores[r, i] >= threshold), visits - 1) for i in range(sequences)]
        loss = math.fsum(losses[r, i].item() for i, r in enumerate(at)) / tokens
        return sum(at) / sequences + 1, math.exp(loss)

    _, deepest = outcome(math.inf)
    chosen = calibrate(scores, losses, tokens, target)
    mean, perplexity = outcome(chosen)
    assert mean <= visits
    assert perplexity <= target * deepest * (1 + 1e-9)
    assert chosen == NEVER or mean < visits
    tried = scores.flatten().quantile(torch.linspace(0, 1, 51, dtype=torch.float64)).tolist()
    faster = [m for m, p in map(outcome, tried) if p <= target * deepest * (1 - 1e-9)]
    assert mean <= min(faster, default=visits) + 1e-9
