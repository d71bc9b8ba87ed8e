"""A rehearsal is the same job but for its widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopscale.cluster.rehearsal import rehearsed
from loopscale.config import ClusterConfig, Config, from_values, load
from loopscale.plan.layout import Layout

RUNS = Path(__file__).parents[2] / "configs/run"


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "layout"),
    [
        ("fixedpoint-l-1p6b", 8, 8, []),
        ("fixedpoint-l-1p6b", 2, 2, []),
        ("fixedpoint-l-pln5", 2, 4, ["parallel.pipeline=2", "parallel.tensor=4"]),
        ("fixedpoint-s", 1, 8, []),
        ("fixedpoint-s", 3, 1, ["parallel.pipeline=3"]),
    ],
)
def test_ranks_stages_and_groups_are_the_runs_own(name, nodes, devices, layout):
    own = load(Config, RUNS / f"{name}.yaml", [*layout, "run.name=l", "model.vocab_size=32000"]).config
    cluster = from_values(ClusterConfig, {"job": {"nodes": nodes, "devices": devices, "spares": 1}}).config
    small, job = rehearsed(own, cluster)
    before, after = (Layout.of(config, nodes, devices) for config in (own, small))
    assert after.batch.groups == before.batch.groups and after.batch.data_parallel == before.batch.data_parallel
    assert (after.ring.slices, after.ring.in_flight) == (before.ring.slices, before.ring.in_flight)
    assert (small.depth, small.objective) == (own.depth, own.objective)
    assert small.parallel.model_copy(update={"slices": own.parallel.slices}) == own.parallel
    assert small.model.model_copy(update={key: getattr(own.model, key) for key in WIDTHS}) == own.model
    assert after.counts.total < before.counts.total / 20
    assert small.run.name == "l-rehearsal" and small.corpus.path == own.corpus.path
    assert (job.job.nodes, job.job.devices, job.job.spares, job.job.gpus) == (nodes, devices, 1, False)


WIDTHS = ("hidden_size", "heads", "kv_heads", "head_dim", "ffn_size")
