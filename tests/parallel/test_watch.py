"""What ranks read of each other in their store: who hangs, why a run ends, and the file of the first that fails.

Several watches of one process share a store, as ranks do.
"""

from __future__ import annotations

import json
import math
import re
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from loopscale.errors import ConfigError, DataError, OutOfMemory, Problem
from loopscale.parallel import crash
from loopscale.parallel.reports import BEAT, LISTENING
from loopscale.parallel.waits import Waits
from loopscale.parallel.watch import SHOWN, Watch

LATE = 20.0
"""Seconds within which what is due each second has come, on a machine that does something else too."""


class Crew:
    """The watches of ``world`` ranks."""

    def __init__(self, world: int):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.waits = [Waits(torch.device("cpu")) for _ in range(world)]
        self.ranks = [Watch(self.store, rank, world, f"stage {rank}", self.waits[rank]) for rank in range(world)]

    def attend(self, folder: Path, stuck_after: float = 0.0) -> None:
        for watch in self.ranks:
            watch.attend(folder, stuck_after, math.inf, print)


@pytest.fixture
def crew(request) -> Iterator[Crew]:
    crew = Crew(getattr(request, "param", 3))
    yield crew
    for watch in crew.ranks:
        watch.close()


def wait(happened) -> None:
    begin = time.monotonic()
    while not happened():
        assert time.monotonic() - begin < LATE
        time.sleep(0.05)


def test_a_step_that_hangs_is_told_with_who_waits_for_whom(crew: Crew, tmp_path, capsys):
    crew.waits[0].waiting_for, crew.waits[1].waiting_for = 1, 2
    for rank, watch in enumerate(crew.ranks):
        watch.begin("step 7", 7)
        watch.doing = f"running visit 2 of microbatch {rank} of step 7"
    crew.attend(tmp_path, stuck_after=1)
    wait((tmp_path / "stuck.txt").exists)
    said = capsys.readouterr().err.splitlines()
    left = (tmp_path / "stuck.txt").read_text().splitlines()
    assert said[1:] == left[1:] and said[0].removeprefix("warning: ") == left[0].split(" ", 1)[1]
    assert said[0].startswith("warning: step 7 has taken ") and said[0].endswith(" s so far; the likely cause first:")
    cause, *others = said[1:]
    assert cause.startswith(f"  rank 2 ({crew.ranks[2].role}) has been running visit 2 of microbatch 2 of step 7 for ")
    assert " and waits for nobody, at " in cause
    assert [line.rpartition(" and ")[2] for line in others] == ["waits for rank 1", "waits for rank 2"]


def test_a_rank_whose_reports_have_ended_is_the_likely_cause(crew: Crew, tmp_path):
    crew.ranks[1].close()
    time.sleep(2 * BEAT)
    crew.ranks[0].begin("saving step 7", 7)
    crew.attend(tmp_path, stuck_after=1)
    wait((tmp_path / "stuck.txt").exists)
    first, cause, *_ = (tmp_path / "stuck.txt").read_text().splitlines()
    assert " saving step 7 has taken " in first
    assert cause.startswith(f"  rank 1 ({crew.ranks[1].role}) has not reported for ") and cause.endswith(" s; it was starting")


@pytest.mark.parametrize("crew", [SHOWN + 3], indirect=True)
def test_the_terminal_is_shown_the_first_of_many_ranks_and_the_file_has_all(crew: Crew, tmp_path, capsys):
    crew.attend(tmp_path, stuck_after=1)
    wait((tmp_path / "stuck.txt").exists)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + SHOWN + 1 and said[-1] == f"  … and 3 more ranks in {tmp_path}/stuck.txt"
    assert len((tmp_path / "stuck.txt").read_text().splitlines()) == 1 + SHOWN + 3


def test_a_rank_that_hangs_but_reports_is_told_by_those_whose_wait_has_timed_out(crew: Crew, tmp_path):
    """Rank 2 alone waits for nobody; rank 1 waits for rank 0, which has been at one thing as long."""
    crew.waits[0].waiting_for, crew.waits[1].waiting_for = 2, 0
    for rank, watch in enumerate(crew.ranks):
        watch.doing = f"running visit {rank} of microbatch 0 of step 3"
    time.sleep(LISTENING)
    sentence = crew.ranks[1].explain(RuntimeError("Timed out waiting 4000ms for recv operation"), timeout=4)
    roles = [re.escape(watch.role) for watch in crew.ranks]
    assert re.match(
        rf"rank 2 \({roles[2]}\) is gone, or has not answered for 4 s; when last heard, \d s ago, it was running visit 2 of "
        rf"microbatch 0 of step 3; rank 1 \({roles[1]}\) noticed while running visit 1 of microbatch 0 of step 3",
        sentence,
    )


def failed(error: Exception) -> Exception:
    """``error`` as it is after it was raised."""
    try:
        try:
            raise ValueError("what lay beneath")
        except ValueError:
            raise error from None
    except type(error) as raised:
        return raised


def test_the_first_that_fails_leaves_the_file_and_the_others_name_it(crew: Crew, tmp_path):
    crew.attend(tmp_path)
    crew.ranks[1].begin("step 4", 4)
    crew.ranks[1].doing = "running visit 1 of microbatch 0 of step 4"
    crew.ranks[1].stopped(failed(DataError("shard 3 is damaged")))
    crew.ranks[2].stopped(failed(DataError("shard 4 is damaged")))
    left = json.loads((tmp_path / crash.NAME).read_text())
    assert {key: left[key] for key in ("rank", "role", "step", "doing", "sentence")} == {
        "rank": 1, "role": crew.ranks[1].role, "step": 4, "doing": "running visit 1 of microbatch 0 of step 4",
        "sentence": "rank 1 stopped: shard 3 is damaged",
    }  # fmt: skip
    beneath, raised = left["traceback"].index("ValueError: what lay beneath"), len(left["traceback"]) - 1
    assert beneath < raised and left["traceback"][raised] == "loopscale.errors.DataError: shard 3 is damaged"
    assert any("in failed" in line for line in left["traceback"])
    assert crew.ranks[0].explain(RuntimeError("Connection closed by peer"), timeout=60) == (
        f"rank 1 stopped: shard 3 is damaged; see {tmp_path / crash.NAME}"
    )
    assert [path.name for path in tmp_path.iterdir()] == [crash.NAME]


@pytest.mark.parametrize("where", ["no folder", "not yet made", "a mistake"])
def test_where_no_file_is_left_the_sentence_is_told_without_it(crew: Crew, tmp_path, where):
    if where != "no folder":
        crew.attend(tmp_path / "gone" if where == "not yet made" else tmp_path)
    mistake = ConfigError("run.yaml", [Problem("train.steps", "is 0")])
    crew.ranks[1].stopped(failed(mistake if where == "a mistake" else DataError("shard 3 is damaged")))
    told = crew.ranks[2].explain(RuntimeError("Connection closed by peer"), timeout=60)
    assert told.startswith("rank 1 stopped: ") and crash.NAME not in told
    assert not list(tmp_path.rglob("crash*"))


def test_one_process_leaves_the_file_too(tmp_path):
    alone = Watch(dist.HashStore(), 0, 1, "stage 0", Waits(torch.device("cpu")))
    alone.attend(tmp_path, 0, math.inf, print)
    alone.stopped(failed(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    left = json.loads((tmp_path / crash.NAME).read_text())
    assert left["sentence"] == "rank 0 stopped: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert left["traceback"][-1] == "RuntimeError: mat1 and mat2 shapes cannot be multiplied"


class Untellable(Exception):
    def __str__(self) -> str:
        raise MemoryError


def test_a_file_that_cannot_be_written_hides_nothing(tmp_path):
    """No byte may be written to any file; and an error whose message takes more memory than there is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert crash.write(tmp_path, {"rank": 0}, DataError("shard 3 is damaged")) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert crash.write(tmp_path, {"rank": 0, "of": object()}, OutOfMemory("no")) is None
    assert not (tmp_path / crash.NAME).exists()
    crash.write(tmp_path, {"rank": 0}, Untellable())


def test_ranks_that_fail_at_once_each_write_a_whole_file_and_one_of_them_stays(tmp_path):
    """As where the store is lost, and no rank hears that another was first."""
    ranks, together = range(8), threading.Barrier(8)

    def fail(folder: Path, rank: int) -> Path | None:
        together.wait()
        return crash.write(folder, {"rank": rank}, DataError(f"told by {rank}"))

    with ThreadPoolExecutor(len(ranks)) as pool:
        for trial in range(20):
            (folder := tmp_path / str(trial)).mkdir()
            assert list(pool.map(fail, [folder] * len(ranks), ranks)) == [folder / crash.NAME] * len(ranks)
            left = json.loads((folder / crash.NAME).read_text())
            assert left["traceback"][-1] == f"loopscale.errors.DataError: told by {left['rank']}"
            assert [path.name for path in folder.iterdir()] == [crash.NAME]


def test_files_of_earlier_starts_are_set_aside_in_order(tmp_path):
    crash.set_aside(tmp_path)
    for rank in (3, 5, 7):
        crash.write(tmp_path, {"rank": rank}, DataError("shard 3 is damaged"))
        crash.write(tmp_path, {"rank": 9}, DataError("it comes too late"))
        crash.set_aside(tmp_path)
    assert [json.loads((tmp_path / f"crash-{n}.json").read_text())["rank"] for n in (1, 2, 3)] == [3, 5, 7]
    assert not (tmp_path / crash.NAME).exists()
