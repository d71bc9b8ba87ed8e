"""What early exit gains and costs, held against the whole batch at every depth, and against a clock that is made up."""

from __future__ import annotations

import io
import itertools
import json
import math

import pytest
import torch
from rich.console import Console

from loopscale.checkpoint.restore import restore
from loopscale.config.tree import ModelConfig
from loopscale.corpus.batches import collate
from loopscale.corpus.packing import PackedCorpus
from loopscale.errors import UsageError
from loopscale.inference import frontier as frontiers
from loopscale.inference.exits import NEVER, Rule, rules
from loopscale.inference.frontier import Frontier, Part, Point, frontier, measure
from loopscale.model.inputs import Documents, Inputs
from tests.conftest import Runs

V, S, K = 53, 12, 3


def microbatch(first: int, batch: int) -> Inputs:
    tokens = torch.randint(V, (batch, S + 1), generator=torch.Generator().manual_seed(first))
    documents = Documents.whole(batch, S, torch.device("cpu"))
    samples = torch.arange(first, first + batch)
    return Inputs(tokens[:, :-1], tokens[:, 1:], documents, samples, purpose="evaluation", final_visit=K)


def by_visit(stage, inputs: Inputs, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's sum of losses and mean margin after every visit of the whole batch, [depth, B]."""
    losses, margins = [], []
    feed, state = stage.prelude(inputs), None
    for r in range(1, depth + 1):
        state = stage.visit(inputs, feed, state, r)
        logits = stage.logits(stage.decode(inputs, state, r)).transpose(0, 1).detach()
        scored, targets = inputs.targets >= 0, inputs.targets.clamp(min=0)
        losses.append((-logits.log_softmax(-1).gather(2, targets[..., None]).squeeze(2) * scored).sum(1).double())
        top = logits.sort(-1).values
        margins.append((top[..., -1] - top[..., -2]).mean(1).double())
    return torch.stack(losses), torch.stack(margins)


def test_losses_and_shares_are_those_of_the_sequences_where_they_leave(mesh):
    from loopscale.model.stage import LoopedStage

    stage = LoopedStage(
        ModelConfig(vocab_size=V, hidden_size=32, heads=4, kv_heads=2, ffn_size=40, init_std=0.2), S, seed=3
    ).requires_grad_(False)
    parts = [microbatch(0, 4), microbatch(4, 3)]
    looked = [by_visit(stage, part, K) for part in parts]
    losses, margins = (torch.cat(both, 1) for both in zip(*looked, strict=True))
    known = margins[:-1].flatten().sort().values
    threshold = float(known[6:8].mean())
    visits = [next((r for r in range(1, K) if margins[r - 1, i] >= threshold), K) for i in range(7)]
    assert len(set(visits)) > 1
    ways = [(1, None), (K, None), (K, Rule(rules(stage.model)["margin"], threshold))]
    first, last, early = measure(stage, parts, ways, Console(file=io.StringIO()))
    assert first.loss == pytest.approx(losses[0].sum().item() / (7 * S), rel=1e-6)
    assert last.loss == pytest.approx(losses[K - 1].sum().item() / (7 * S), rel=1e-6)
    assert early.loss == pytest.approx(sum(losses[r - 1, i].item() for i, r in enumerate(visits)) / (7 * S), rel=1e-6)
    assert (first.exits, last.exits) == ([1, 0, 0], [0, 0, 1])
    assert early.exits == pytest.approx([visits.count(r) / 7 for r in (1, 2, 3)])
    assert early.mean_loops == pytest.approx(sum(visits) / 7)


def test_a_disturbed_round_does_not_count(mesh, monkeypatch):
    """Seconds of the one way at the two microbatches in four rounds: the first warms up, the medians are 2 and 1."""
    lasting = iter([50, 50, 2, 1, 90, 1, 2, 70])
    ticks = itertools.accumulate(x for seconds in lasting for x in (1000, seconds))
    monkeypatch.setattr(frontiers, "run", lambda stage, inputs, depth, rule: iter(()))
    monkeypatch.setattr(frontiers, "_now", lambda inputs: next(ticks))

    class Stage:
        def finished(self, inputs: Inputs) -> None: ...

    (point,) = measure(Stage(), [microbatch(0, 4), microbatch(4, 3)], [(K, None)], Console(file=io.StringIO()))
    assert point.tokens_per_second == pytest.approx(7 * S / 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_corpus) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("trained"), text_corpus)
    gated = ["model.inject=none", "model.state_init=embedding", "depth.prior=fixed", "model.prelude_layers=0"]
    runs.train("gated", "train.steps=10", "checkpoint.every=0", "model.exit_gate=raw", "objective.kind=exit_gate", *gated)
    runs.train("once", "train.steps=1", "checkpoint.every=0", "depth.prior=fixed", "depth.mean=1", "depth.backprop=1")
    return runs


@pytest.mark.ranks
def test_one_half_sets_the_thresholds_and_the_other_is_measured(mesh, trained, threads_as_before):
    frontier(trained.path("gated"), sequences=7, batch=2)
    found = json.loads((trained.path("gated") / "evaluations" / "step-10-exits.json").read_text())
    keys = "created checkpoint source protocol depth target calibration measured fixed rules"
    assert list(found) == keys.split()
    assert (found["checkpoint"], found["depth"], found["target"]) == ("step-10", K, 1.01)

    restored = restore(trained.path("gated"))
    corpus = restored.config.corpus
    packed = PackedCorpus(corpus.path, "validation", corpus.sequence_length)
    halves = [
        Inputs.of(collate([packed[i] for i in own], own), mesh.device, final_visit=K, purpose="evaluation")
        for own in (range(3), range(3, 7))
    ]
    counts = [{"sequences": len(half.tokens), "tokens": int((half.targets != -100).sum())} for half in halves]
    assert [found["calibration"], found["measured"]] == counts
    (calibrating, margins), (losses, measured_margins) = (by_visit(restored.stage, half, K) for half in halves)
    tokens = counts[1]["tokens"]
    assert [each["depth"] for each in found["fixed"]] == [1, 2, 3]
    assert [each["loss"] for each in found["fixed"]] == pytest.approx((losses.sum(1) / tokens).tolist(), rel=1e-5)
    assert all(each["tokens_per_second"] > 0 for each in found["fixed"])

    assert list(found["rules"]) == ["margin", "kl", "gate"]
    for rule in found["rules"].values():
        assert list(rule) == ["threshold", "loss", "tokens_per_second", "mean_loops", "exits"]
        assert sum(rule["exits"]) == pytest.approx(1)
        assert rule["mean_loops"] == pytest.approx(sum(r * share for r, share in enumerate(rule["exits"], 1)))
    margin = found["rules"]["margin"]
    threshold = math.inf if margin["threshold"] is None else margin["threshold"]

    def left(scores: torch.Tensor) -> list[int]:
        return [next((r for r in range(1, K) if scores[r - 1, i] >= threshold), K) for i in range(scores.shape[1])]

    spent = sum(calibrating[r - 1, i].item() for i, r in enumerate(left(margins)))
    assert spent <= calibrating[-1].sum().item() + counts[0]["tokens"] * math.log(1.01) + 1e-3
    visits = left(measured_margins)
    assert margin["exits"] == pytest.approx([visits.count(r) / 4 for r in (1, 2, 3)])
    expected = sum(losses[r - 1, i].item() for i, r in enumerate(visits)) / tokens
    assert margin["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks
def test_what_cannot_be_measured_is_told(mesh, trained, threads_as_before):
    with pytest.raises(UsageError, match="two sequences at least"):
        frontier(trained.path("gated"), sequences=1)
    with pytest.raises(UsageError, match=r"needs a loop to leave early, and .*once is evaluated at depth 1"):
        frontier(trained.path("once"))


def test_the_table_fits_80_columns_and_a_rule_without_threshold_is_null():
    fixed = {1: Point(2.0, 3000.0, [1.0, 0.0]), 2: Point(2.0 - math.log(2), 1000.0, [0.0, 1.0])}
    early = {"margin": Point(2.0, 700.0, [0.0, 1.0]), "kl": Point(2.0 - math.log(2), 1500.5, [0.25, 0.75])}
    thresholds = {"margin": NEVER, "kl": -0.0125}
    found = Frontier("step-9", "validation split of data/sotu", "fp32", Part(3, 60), Part(4, 80), fixed, early, thresholds)
    written = found.as_json()
    assert (written["rules"]["margin"]["threshold"], written["rules"]["kl"]["threshold"]) == (None, -0.0125)
    assert written["rules"]["kl"]["mean_loops"] == 1.75
    assert written["fixed"][1] == {"depth": 2, "loss": 2.0 - math.log(2), "tokens_per_second": 1000.0}
    console = Console(file=io.StringIO(), width=80)
    console.print(found.table())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = {cells[1].strip(): [c.strip() for c in cells[2:-1]] for cells in (x.split("│") for x in lines) if len(cells) == 8}
    assert rows["depth 1"] == ["7.39", "2.0000", "3,000", "1.00", ""]
    assert rows["margin, never"] == ["7.39", "2.0000", "700", "2.00", "0 100"]
    assert rows["kl ≤ 0.0125"] == ["3.69", "1.0000", "1,500", "1.75", "25 75"]
