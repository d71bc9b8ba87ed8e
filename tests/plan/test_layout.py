"""Ranks, replicas and slices before anything starts."""

from __future__ import annotations

import pytest

from loopscale.errors import ConfigError
from loopscale.plan.layout import Layout, by_stage


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((None, None), (1, 8)),
        ((2, None), (2, 4)),
        ((None, 4), (2, 4)),
        ((None, 16), (1, 16)),
        ((3, None), (3, 8)),
        ((4, 8), (4, 8)),
    ],
)
def test_numbers_of_ranks_that_are_not_given_make_whole_replicas(config, given, found):
    layout = Layout.of(config(parallel={"tensor": 2, "pipeline": 4}, batch={"global_batch": 96}), *given)
    assert (layout.nodes, layout.per_node) == found
    assert layout.batch.data_parallel == found[0] * found[1] // 8


def test_ranks_that_make_no_whole_replicas_are_refused(config):
    with pytest.raises(ConfigError, match=r"parallel\.pipeline +is 2: .* does not divide 6 rank"):
        Layout.of(config(parallel={"tensor": 2, "pipeline": 2}), 1, 6)


@pytest.mark.parametrize(
    ("order", "nodes", "per_node", "said"),
    [
        ("tp-dp-pp", 2, 4, "node 0: home of replicas 0–1; node 1: stage 1 of replicas 0–1"),
        ("tp-pp-dp", 2, 4, "node 0: replica 0; node 1: replica 1"),
        ("tp-dp-pp", 1, 8, "node 0: replicas 0–1"),
        ("tp-dp-pp", 2, 2, "node 0: home of replica 0; node 1: stage 1 of replica 0"),
        ("tp-pp-dp", 2, 6, "node 0: home of replicas 0–1, stage 1 of replica 0; "
         "node 1: home of replica 2, stage 1 of replicas 1–2"),
        ("tp-pp-dp", 5, 4, "node 0: replica 0; node 1: replica 1; node 2: replica 2; …"),
        ("tp-dp-pp", 4, 1, "node 0: home of replica 0; node 1: home of replica 0; node 2: stage 1 of replica 0; … · ranks that "
         "share layers lie on different nodes"),
    ],
)  # fmt: skip
def test_ranks_are_told_by_node(config, order, nodes, per_node, said):
    parallel = {"tensor": 2, "pipeline": 2, "order": order}
    layout = Layout.of(config(parallel=parallel, batch={"global_batch": 240}), nodes, per_node)
    assert layout.describe_ranks() == said


def test_the_place_of_every_rank_is_megatrons(config):
    from megatron.core.parallel_state import RankGenerator

    for order in ("tp-dp-pp", "tp-pp-dp"):
        layout = Layout.of(config(parallel={"tensor": 2, "pipeline": 4, "order": order}, batch={"global_batch": 96}), 3, 8)
        ranks = RankGenerator(tp=2, ep=1, dp=3, pp=4, cp=1, order=order)
        stages = {rank: group.index(rank) for group in ranks.get_ranks("pp") for rank in group}
        replicas = {rank: group.index(rank) for group in ranks.get_ranks("dp") for rank in group}
        assert [layout.place(rank) for rank in range(24)] == [(stages[rank], replicas[rank]) for rank in range(24)]


def test_slices_are_told_home_first(config):
    def said(**parallel):
        return Layout.of(config(parallel=parallel)).describe_slices()

    assert said() == "home: 1 prelude + 6 core + 1 coda"
    assert said(pipeline=4, slices=[0, 3, 2, 1]) == (
        "home: 1 prelude + 0 core + 1 coda, stage 1: 3 core layers, stage 2: 2 core layers, stage 3: 1 core layer"
    )
    assert said(pipeline=3, slices=[2, 2, 2]) == "home: 1 prelude + 2 core + 1 coda, stages 1–2: 2 core layers each"


def test_values_of_stages_are_told_together_where_they_agree():
    assert by_stage(["1"]) == "home: 1"
    assert by_stage(["1", "1", "1"]) == "every stage: 1"
    assert by_stage(["1", "2", "2", "1"]) == "home: 1 · stages 1–2: 2 · stage 3: 1"
    assert by_stage(["1", "1", "2"]) == "home and stage 1: 1 · stage 2: 2"
