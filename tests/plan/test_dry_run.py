"""What `loopscale train --dry-run` says of layouts with several stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loopscale.config import Config, load
from loopscale.plan.dry_run import dry_run

CONFIGS = Path(__file__).parents[2] / "configs"


def test_one_stage_is_told_as_one(config):
    said = dry_run(config(batch={"global_batch": 64}), 2, 4).splitlines()
    assert said[1] == "layout   TP 1 × PP 1 × DP 8 · ZeRO-1 · one stage · 8 ranks on 2 nodes of 4"
    assert said[2] == "ranks    node 0: replicas 0–3; node 1: replicas 4–7"
    assert not any(line.startswith(("slices", "         by stage")) for line in said)
    assert "8 depth groups of 8, 1 per replica · microbatch 1, 8 a step" in "".join(said)


def test_a_ring_is_told_with_its_heaviest_stage(config):
    asked = config(parallel={"tensor": 2, "pipeline": 2, "slices": [0, 6]}, train={"precision": "bf16"})
    said = dry_run(asked, 2, 4).splitlines()
    assert said[1:4] == [
        "layout   TP 2 × PP 2 × DP 2 · ZeRO-1 · home + 1 slice · 4 microbatches in flight · 8 ranks on 2 nodes of 4",
        "slices   home: 1 prelude + 0 core + 1 coda, stage 1: 6 core layers",
        "ranks    node 0: home of replicas 0–1; node 1: stage 1 of replicas 0–1",
    ]
    heaviest = next(line for line in said if line.startswith("memory"))
    assert heaviest.startswith("memory   per rank of stage 1, the heaviest stage: parameters")
    total = re.search(r"= ([\d.]+) GiB · visits in bf16$", heaviest)[1]
    by_stage = re.fullmatch(r" +by stage, GiB: home: ([\d.]+) · stage 1: ([\d.]+)", said[said.index(heaviest) + 1])
    assert by_stage[2] == total and float(by_stage[1]) < float(total)


def test_the_kinds_add_up_to_the_peak_and_an_assumed_precision_is_told(config):
    memory = next(
        line for line in dry_run(config(model={"hidden_size": 1024, "ffn_size": 4096})).splitlines() if "memory" in line
    )
    kinds, peak = re.fullmatch(r"memory   per rank: (.*)  = ([\d.]+) GiB · visits in fp32, for CPUs", memory).groups()
    numbers = [float(number) for number in re.findall(r"[\d.]+", kinds)]
    assert re.findall("[a-z]+", kinds) == ["parameters", "gradients", "optimizer", "buffers", "activations", "logits"]
    assert sum(numbers) == pytest.approx(float(peak), abs=0.03) and float(peak) > 1
    with_copies = dry_run(config(batch={"global_batch": 8}, corpus={"sequence_length": 2}, depth={"prior": "fixed", "mean": 1}))
    assert "  update " in with_copies and "  activations " not in with_copies


@pytest.mark.parametrize("kind", ["exit_gate", "exit_gate_stage2"])
def test_gated_objectives_have_a_dry_run(config, kind):
    asked = config(
        model={"exit_gate": "normed"}, objective={"kind": kind}, depth={"prior": "fixed", "mean": 4}, parallel={"pipeline": 3}
    )
    assert "home + 2 slices" in dry_run(asked)


def test_memory_of_gpus_is_told_where_there_is_none(config):
    """The 1.6B run's, as `configs/run/fixedpoint-l-1p6b.yaml` states it."""
    large = load(Config, CONFIGS / "run/fixedpoint-l-1p6b.yaml").config
    told = {gpus: dry_run(large, 8, 8, gpus) for gpus in (True, False)}
    assert "= 46.59 GiB · visits in bf16, for GPUs" in told[True]
    assert "visits in fp32, for CPUs" in told[False]
    assert "entropy 0 nats" in dry_run(config(depth={"prior": "fixed", "mean": 4}))
