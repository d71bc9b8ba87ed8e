"""The same job with toy widths: a mistake in a layout, a path or a node shows in minutes, on CPUs, before the queue is paid."""

from __future__ import annotations

from typing import Any

from loopscale.config import ClusterConfig, Config, from_values
from loopscale.plan.layout import Layout

STEPS, LENGTH, HEAD_WIDTH, MINUTES = 8, 64, 16, 30
PER_GROUP = 2
"""Microbatches of a depth group on each rank, at most."""


def rehearsed(config: Config, cluster: ClusterConfig) -> tuple[Config, ClusterConfig]:
    """``config`` and ``cluster`` with the same nodes, ranks, stages, depth groups, law of depth, corpus, and places to write,
    for a model of toy width that trains a few steps of short sequences."""
    layout = Layout.of(config, cluster.job.nodes, cluster.job.devices)
    model, tensor, batch = config.model, config.parallel.tensor, layout.batch
    groups = -(-2 // tensor) * tensor  # of heads that share keys: they are divided over ranks
    width = HEAD_WIDTH * groups * (model.heads // model.key_value_heads)
    accumulation = batch.groups * min(batch.microbatches_per_group, PER_GROUP)
    steps = min(config.train.steps, STEPS)
    changed: dict[str, dict[str, Any]] = {
        "run": {"name": f"{config.run.name}-rehearsal"},
        "corpus": {"sequence_length": min(config.corpus.sequence_length, LENGTH)},
        "model": {
            "hidden_size": width, "heads": width // HEAD_WIDTH, "kv_heads": groups, "head_dim": HEAD_WIDTH, "ffn_size": 2 * width,
        },
        "batch": {"global_batch": accumulation * batch.data_parallel, "microbatch": 1, "accumulation": None},
        "parallel": {"slices": list(layout.ring.slices) if layout.stages > 1 else "even"},
        "train": {"steps": steps, "precision": "fp32", "kernels": "auto", "max_time": None},
        "validation": {"every": steps // 2, "sequences": 8},
        "checkpoint": {"every": max(steps // 3, 1), "keep_every": 0},
        "log": {"every": 1, "wandb": "disabled"},
    }  # fmt: skip
    values = config.model_dump(mode="json")
    small = from_values(Config, {section: values[section] | changed.get(section, {}) for section in values}, "rehearsal").config
    job = cluster.job.model_copy(update={"gpus": False, "time": min(cluster.job.time, MINUTES)})
    return small, cluster.model_copy(update={"job": job.model_copy(update={"notice": min(job.notice, 60)})})
