"""The pool of rank processes: any sizes in any order, any layout, failures told and survived."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor

from loopscale.config.tree import ParallelConfig
from loopscale.parallel import mesh as meshes
from loopscale.parallel.mesh import Mesh
from tests.parallel import test_zero
from tests.ranks import DIED, LATE, LOST, RAISED, RankError, Ranks, Worker

pytestmark = pytest.mark.ranks


def add_numbers(mesh: Mesh) -> float:
    return float(meshes.sum_over_ranks(torch.tensor(mesh.rank + 1.0)))


def test_sizes_in_any_order(ranks: Ranks) -> None:
    for size in (2, 4, 1, 3, 4, 2, 2, 1):
        assert ranks.run(add_numbers, size) == [size * (size + 1) / 2] * size


def peers(mesh: Mesh) -> tuple[list[int], ...]:
    """The ranks that share this rank's layers, hold the same ones for other data, and make up its replica."""

    def summed(over) -> list[int]:
        bits = int(over(torch.tensor(1 << mesh.rank)))
        return [rank for rank in range(mesh.world) if bits >> rank & 1]

    return summed(meshes.sum_over_tensor_ranks), summed(meshes.sum_over_replicas), summed(meshes.sum_over_replica)


def test_layouts_one_after_the_other(ranks: Ranks) -> None:
    for size, layout, of_rank_0 in (
        (2, ParallelConfig(tensor=2), ([0, 1], [0], [0, 1])),
        (2, ParallelConfig(pipeline=2), ([0], [0], [0, 1])),
        (3, ParallelConfig(pipeline=3), ([0], [0], [0, 1, 2])),
        (4, ParallelConfig(tensor=2, pipeline=2), ([0, 1], [0], [0, 1, 2, 3])),
        (4, ParallelConfig(pipeline=4), ([0], [0], [0, 1, 2, 3])),
        (4, ParallelConfig(pipeline=2), ([0], [0, 1], [0, 2])),
        (4, ParallelConfig(pipeline=2, order="tp-pp-dp"), ([0], [0, 2], [0, 1])),
        (4, ParallelConfig(tensor=2), ([0, 1], [0, 2], [0, 1])),
        (1, ParallelConfig(), ([0], [0], [0])),
    ):
        assert ranks.run(peers, size, parallel=layout)[0] == of_rank_0


def test_zero_steps_in_jobs_of_different_sizes(ranks: Ranks) -> None:
    for size, layout in ((2, ParallelConfig()), (4, ParallelConfig(tensor=2)), (3, ParallelConfig()), (1, ParallelConfig())):
        found = ranks.run(test_zero.compare, size, 1, parallel=layout)
        assert len(found) == size
        assert max(found) <= test_zero.TOLERANCE


def draw(mesh: Mesh, count: int, *, scale: float) -> tuple[Tensor, int, str | None]:
    """What a job finds and what it leaves behind."""
    threads, left = torch.get_num_threads(), os.environ.get("LEFT")
    torch.set_num_threads(2)
    os.environ["LEFT"] = "behind"
    print("not an answer")
    return torch.rand(count) * scale, threads, left


def test_a_job_begins_like_the_first(ranks: Ranks) -> None:
    expected = torch.rand(5, generator=torch.Generator().manual_seed(0)) * 3.0
    for _ in range(2):
        for drawn, threads, left in ranks.run(draw, 2, 5, scale=3.0):
            torch.testing.assert_close(drawn, expected)
            assert (threads, left) == (1, None)


def fail(mesh: Mesh, failing: int) -> None:
    if mesh.rank == failing:
        raise ValueError(f"rank {failing} is to blame")
    add_numbers(mesh)


def test_an_error_comes_before_its_consequences(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised:(.|\n)+ValueError: rank 1 is to blame") as caught:
        ranks.run(fail, 2, 1)
    assert [(f.rank, f.fate) for f in caught.value.failures] == [(1, RAISED), (0, LOST)]
    assert ranks.run(add_numbers, 2) == [3.0, 3.0]


def oversleep(mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(600)
    add_numbers(mesh)


def test_a_job_that_takes_too_long_shows_where_its_ranks_are(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="in oversleep") as caught:
        ranks.run(oversleep, 2, timeout=3)
    assert {(f.rank, f.fate) for f in caught.value.failures} == {(0, LATE), (1, LATE)}
    assert all("in add_numbers" in f.report for f in caught.value.failures if f.rank == 0)
    assert ranks.run(add_numbers, 2) == [3.0, 3.0]


def die(mesh: Mesh) -> None:
    os.write(2, b"last words")
    os._exit(7)


def give_back_a_function(mesh: Mesh):
    return lambda: None


def test_death_and_answers_that_cannot_be_sent_are_failures(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"exit code 7\nlast words") as caught:
        ranks.run(die, 1)
    assert caught.value.failures[0].fate == DIED
    with pytest.raises(RankError, match="pickle"):
        ranks.run(give_back_a_function, 1)


def test_a_worker_ends_when_pytest_is_gone() -> None:
    worker = Worker(0)
    try:
        worker.close_jobs()
        deadline = time.monotonic() + 30
        while not worker.has_died() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert worker.has_died(), "it still runs"
    finally:
        worker.kill()
