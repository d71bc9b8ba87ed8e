"""From SLURM's variables to torchrun's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscale.cluster.world import World
from loopscale.errors import ClusterError

TASK = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-09],login1", "MASTER_ADDR": "left by somebody",
}  # fmt: skip


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_task_of_srun_gets_the_variables_of_torchrun(task):
    assert World.from_slurm().variables() == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "29422",
    }  # fmt: skip


def test_without_srun_or_with_tasks_out_of_order_the_reason_is_told(task):
    task.setenv("SLURM_NODEID", "1")  # cyclic distribution
    with pytest.raises(ClusterError, match="task 5 of 8 is number 1 on node 1 of 4; tasks must lie evenly and in order"):
        World.from_slurm()
    task.delenv("SLURM_PROCID")
    with pytest.raises(ClusterError, match="SLURM_PROCID is not set: this is no task of a SLURM job; start one per device"):
        World.from_slurm()


@given(st.integers(1, 6), st.integers(1, 4), st.sets(st.integers(0, 5)), st.integers(1, 6))
def test_ranks_of_the_nodes_that_are_left_are_whole_and_meet_at_one_place(nodes, devices, sick, needed):
    names = tuple(f"n{i}" for i in range(nodes))
    ill = [f"n{i}" for i in sick]
    tasks = [World(names, devices, node, local, 29400) for node in range(nodes) for local in range(devices)]
    chosen = [world for task in tasks if (world := task.without(ill, needed)) is not None]
    fit = [name for name in names if name not in ill][:needed]
    assert [world.rank for world in chosen] == list(range(len(fit) * devices))
    assert {world.host for world in chosen} == set(fit)
    assert len({(v["MASTER_ADDR"], v["MASTER_PORT"], v["WORLD_SIZE"]) for v in (w.variables() for w in chosen)}) <= 1
