"""The shipped runs of published size: what each trains, and that it fits the machines that its comments name."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch

from loopscale.config import Config, load
from loopscale.config.study import load_study
from loopscale.depth import DepthLaw
from loopscale.model.memory import predict_memory
from loopscale.model.ring import draws_at, works_at
from loopscale.plan.layout import Layout
from loopscale.plan.timetable import idle_shares

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS, STUDIES = CONFIGS / "run", CONFIGS / "studies"


def run(name: str, *overrides: str) -> Config:
    return load(Config, RUNS / f"{name}.yaml", overrides).config


def gib(layout: Layout) -> list[float]:
    """What a rank of each stage will hold on a GPU."""
    stages = predict_memory(layout.config, layout.batch, layout.ring, torch.device("cuda"), torch.bfloat16)
    return [stage.peak / 2**30 for stage in stages]


@pytest.mark.parametrize(
    ("name", "nodes", "sizes", "microbatch", "accumulation", "peak"),
    [
        ("fixedpoint-s", 1, "TP 1 × PP 1 × DP 8", 2, 32, 30.0),
        ("fixedpoint-m", 4, "TP 1 × PP 1 × DP 32", 1, 16, 38.9),
        ("fixedpoint-m", 1, "TP 1 × PP 1 × DP 8", 1, 64, 39.7),
        ("fixedpoint-l-1p6b", 8, "TP 2 × PP 1 × DP 32", 1, 16, 46.6),
        ("fixedpoint-l-1p6b", 4, "TP 2 × PP 1 × DP 16", 1, 32, 47.0),
        ("fixedpoint-l-pln5", 8, "TP 2 × PP 1 × DP 32", 1, 16, 46.6),
        ("fixedpoint-l-fixed5", 8, "TP 2 × PP 1 × DP 32", 1, 16, 31.0),
        ("fixedpoint-l-learned", 8, "TP 2 × PP 1 × DP 32", 1, 16, 46.6),
    ],
)
def test_a_layout_settles_and_fits_nodes_of_eight(name, nodes, sizes, microbatch, accumulation, peak):
    layout = Layout.of(run(name), nodes, 8)
    assert (layout.sizes(), layout.batch.microbatch, layout.batch.accumulation) == (sizes, microbatch, accumulation)
    assert gib(layout) == pytest.approx([peak], abs=0.5)
    assert layout.config.train.recompute == "none"


def test_a_replica_of_the_large_run_on_each_gpu_needs_an_h200():
    layout = Layout.of(run("fixedpoint-l-1p6b", "parallel.tensor=1", "parallel.sequence_parallel=false"), 4, 8)
    assert layout.sizes() == "TP 1 × PP 1 × DP 32"
    assert gib(layout) == pytest.approx([92.5], abs=0.5)


@pytest.mark.parametrize(
    ("stages", "nodes", "idle", "peaks"),
    [(2, 8, [0.0, 0.38], [100, 70]), (3, 6, [0.45, 0.11, 0.11], [58, 162, 158])],
)
def test_why_the_large_run_has_no_pipeline(stages, nodes, idle, peaks):
    one_a_stage = ("parallel.tensor=1", "parallel.sequence_parallel=false", f"parallel.pipeline={stages}")
    layout = Layout.of(run("fixedpoint-l-1p6b", *one_a_stage), nodes, 8)
    law = DepthLaw(layout.config.depth)
    draws = [draws_at(layout.config, layout.batch, law, step) for step in range(10)]
    shares = [idle_shares(layout.ring.plan(works_at(layout.config, layout.batch, drawn))) for drawn in draws]
    assert [mean(own) for own in zip(*shares, strict=True)] == pytest.approx(idle, abs=0.03)
    assert gib(layout) == pytest.approx(peaks, abs=1)


@pytest.mark.parametrize(
    ("name", "parameters", "step", "total"),
    [
        ("fixedpoint-s", 0.304, 4_194_304, 21.47),
        ("fixedpoint-m", 0.819, 4_194_304, 85.90),
        ("fixedpoint-l-1p6b", 2.488, 4_194_304, 343.6),
        ("fixedpoint-l-pln5", 2.488, 4_194_304, 343.6),
        ("fixedpoint-l-fixed5", 2.488, 4_194_304, 343.6),
        ("fixedpoint-l-learned-h0", 2.488, 4_194_304, 343.6),
    ],
)
def test_size_and_tokens_are_the_papers(name, parameters, step, total):
    layout = Layout.of(run(name), 1, 8)
    tokens = layout.batch.global_batch * layout.config.corpus.sequence_length
    assert round(layout.counts.total / 1e9, 3) == parameters
    assert tokens == step
    assert tokens * layout.config.train.steps / 1e9 == pytest.approx(total, rel=1e-3)
    assert (layout.config.model.vocab_size, layout.config.corpus.path) == (64_256, "data/pretrain")


def test_arms_of_paper_b_differ_in_what_the_paper_varies():
    large, pln, fixed = (run(f"fixedpoint-l-{name}") for name in ("1p6b", "pln5", "fixed5"))
    assert (large.model.inject, large.depth.prior, large.optimizer.lr) == ("ortho", "pln", 5e-4)
    assert (pln.model.inject, pln.depth.prior, pln.optimizer.lr) == ("diagonal", "pln", 5e-4)
    assert (fixed.model.inject, fixed.depth.prior, fixed.optimizer.lr) == ("diagonal", "fixed", 1e-3)
    assert (fixed.depth.evaluation_depth, fixed.depth.gradient_visits(5)) == (5, 5)
    assert large.model_copy(update={"model": pln.model}) == pln
    assert pln.model_copy(update={"depth": fixed.depth, "optimizer": fixed.optimizer}) == fixed
    for name, entropy in (("learned", 0.01), ("learned-h0", 0.0)):
        learned = run(f"fixedpoint-l-{name}")
        assert (learned.depth.prior, learned.depth.entropy_coef, learned.depth.lr, learned.optimizer.lr) == (
            "learned",
            entropy,
            1e-3,
            1e-3,
        )
        assert pln.model_copy(update={"depth": learned.depth, "optimizer": learned.optimizer}) == learned


CONDITIONS = {
    "per-loop": ("per_loop", "rmsnorm", 0.0, 0.0, "none"),
    "per-loop-raw": ("per_loop", "raw", 0.0, 0.0, "none"),
    "per-loop-penalty": ("per_loop", "rmsnorm", 0.01, 0.0, "none"),
    "terminal": ("terminal", "rmsnorm", 0.0, 0.0, "none"),
    "per-loop-between": ("per_loop", "rmsnorm", 0.0, 0.0, "rmsnorm"),
    "per-loop-final-only": ("per_loop", "final_only", 0.0, 0.0, "none"),
    "per-loop-anchor": ("per_loop", "rmsnorm", 0.0, 0.1, "none"),
    "terminal-raw": ("terminal", "raw", 0.0, 0.0, "none"),
    "terminal-penalty": ("terminal", "rmsnorm", 0.01, 0.0, "none"),
}
"""Paper A's: objective, readout, weights of penalty and anchor, norm between loops."""


@pytest.mark.parametrize("name", ["blind-spot", "blind-spot-44m", "blind-spot-129m"])
def test_studies_of_paper_a_hold_its_conditions_and_differ_in_nothing_else(name):
    runs = load_study(STUDIES / f"{name}.yaml").runs
    assert [(r.arm, r.seed) for r in runs] == [(arm, seed) for seed in (42, 101, 202) for arm in CONDITIONS]
    for each in runs:
        config, base = each.loaded.config, runs[0].loaded.config
        objective, model = config.objective, config.model
        found = (objective.kind, model.readout, objective.norm_penalty, objective.anchor, model.between)
        assert found == CONDITIONS[each.arm] and objective.anchor_target == 1
        assert config.model_copy(update={"model": base.model, "objective": base.objective, "run": base.run}) == base


@pytest.mark.parametrize(
    ("name", "sequences", "steps", "millions", "memory"),
    [("blindspot-44m", 64, 100_000, 43.9, 16.6), ("blindspot-129m", 32, 200_000, 128.8, 20.3)],
)
def test_runs_of_paper_a_fit_one_gpu(name, sequences, steps, millions, memory):
    config = run(name)
    layout = Layout.of(config, 1, 1)
    assert (layout.batch.global_batch, layout.batch.microbatch, config.corpus.sequence_length) == (sequences, sequences, 256)
    assert config.train.steps == steps
    assert round(layout.counts.total / 1e6, 1) == millions
    assert gib(layout) == pytest.approx([memory], abs=1)
    assert (config.depth.prior, config.depth.mean, config.model.tied_head) == ("fixed", 4, True)


def test_checkpoints_of_long_runs_fall_on_validations_and_ten_stay():
    for name, validation, kept in (("s", 256, 512), ("m", 512, 2048), ("l-1p6b", 1024, 8192)):
        config = run(f"fixedpoint-{name}")
        assert (config.checkpoint.every, config.validation.every, config.checkpoint.keep_every) == (256, validation, kept)
        assert config.train.steps == 10 * kept
        assert config.checkpoint.background and config.checkpoint.folder is None
