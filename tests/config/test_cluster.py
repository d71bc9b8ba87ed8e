"""Cluster files: their rules, each with a way out."""

from __future__ import annotations

from pathlib import Path

from loopscale.config import ClusterConfig, load

FOLDER = Path(__file__).parents[2] / "configs/cluster"


def test_a_job_of_eight_gpus_a_node_leaves_time_to_save_and_to_be_queued_again():
    for name, nodes in (("h100x8", 8), ("h200x8", 4)):
        cluster = load(ClusterConfig, FOLDER / f"{name}.yaml").config
        job = cluster.job
        assert (job.nodes, job.devices, job.gpus, job.exclusive, job.time) == (nodes, 8, True, True, 1440)
        assert job.notice > 120  # train.grace
        assert cluster.retries == 3
        assert (cluster.preflight.shm, cluster.preflight.timeout) == (8, 300)
