"""Cluster files: their rules, each with a way out."""

from __future__ import annotations

import pytest

from loopscale.config import ClusterConfig, from_values, load
from loopscale.errors import ConfigError

<<<<<<< HEAD
=======
FOLDER = Path(__file__).parents[2] / "configs/cluster"
SHIPPED = sorted(FOLDER.glob("*.yaml"))

>>>>>>> hc

def test_times_are_written_as_people_say_them(tmp_path):
    (tmp_path / "c.yaml").write_text("job: {nodes: 2, devices: 8, time: 1:30}\nenvironment: [NCCL_DEBUG=WARN]\n")
    config = load(ClusterConfig, tmp_path / "c.yaml", ["job.nodes=4"]).config
    assert (config.job.nodes, config.job.time, config.environment) == (4, 90, ("NCCL_DEBUG=WARN",))


@pytest.mark.parametrize(
    ("content", "key", "sentence"),
    [
        ({"container": {"engine": "pyxis"}}, "container.image", "must be given for container.engine pyxis"),
        ({"container": {"image": "a.sif"}}, "container.engine", "use pyxis, apptainer or podman"),
        ({"job": {"notice": 120, "time": 2}}, "job.notice", "is 120 s, not less than job.time 2 min"),
        ({"job": {"sbatch": ["reservation=x", "time=3"]}}, "job.sbatch", "has time=3, which is set by other keys"),
        ({"job": {"partitions": "a"}}, "job.partitions", "did you mean job.partition?"),
        ({"environment": ["NCCL DEBUG"]}, "environment", "is 'NCCL DEBUG', must be a list of text, matching"),
    ],
)
def test_what_cannot_be_is_one_sentence_with_its_key(content, key, sentence):
    with pytest.raises(ConfigError) as caught:
        from_values(ClusterConfig, content)
    (problem,) = caught.value.problems
    assert problem.key == key and sentence in problem.sentence
<<<<<<< HEAD
=======


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_load(path):
    assert load(ClusterConfig, path).config.job.devices >= 1


def test_a_job_of_eight_gpus_a_node_leaves_time_to_save_and_to_be_queued_again():
    for name, nodes in (("h100x8", 8), ("h200x8", 4)):
        cluster = load(ClusterConfig, FOLDER / f"{name}.yaml").config
        job = cluster.job
        assert (job.nodes, job.devices, job.gpus, job.exclusive, job.time) == (nodes, 8, True, True, 1440)
        assert job.notice > 120  # train.grace
        assert cluster.retries == 3
        assert (cluster.preflight.shm, cluster.preflight.timeout) == (8, 300)
>>>>>>> hc
