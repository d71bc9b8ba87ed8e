"""Who waits for whom, out of what each rank reports; and when that is said."""

from __future__ import annotations

import time

import pytest

from loopscale.parallel import mesh as meshes
from loopscale.parallel.mesh import Mesh
from loopscale.parallel.reports import LISTENING, Alarm, Report, Silence, whereabouts, who_waits


def report(doing: str, held: float, waiting_for=(), number: int = 7, role: str = "stage 0, node1") -> Report:
    return Report(number, 1000.0, role, doing, 1000.0 - held, waiting_for, "stage.py:12")


def test_a_rank_is_silent_since_its_number_stands_still():
    silence = Silence()
    for now, numbers, expected in (
        (0.0, (1, 1), None),
        (5.0, (2, 1), None),
        (9.0, (3, 2), None),  # it was late
        (18.0, (3, 2), None),  # nobody was heard for 9 s: perhaps it was the listener who slept
        (19.0, (4, 2), None),
        (19.1, (4, 2), 1),
    ):
        reports = {rank: report("saving step 5", 1, number=number) for rank, number in enumerate(numbers)}
        assert silence.longer_than(10.0, reports, now) == expected, now


def test_the_silent_come_first_then_those_that_wait_for_nobody_the_longest_before_the_others():
    reports = {
        0: report("reading the data of step 5", 2),
        1: report("running visit 2 of microbatch 0 of step 5", 40, (3,), role="stage 1, node1"),
        2: report("running exit 1 of microbatch 3 of step 5", 41),
        3: report("running visit 1 of microbatch 1 of step 5", 44, role="stage 0, node2"),
    }
    assert who_waits(reports, {3}, now=1015.0) == [
        "rank 3 (stage 0, node2) has not reported for 15 s; it was running visit 1 of microbatch 1 of step 5",
        "rank 2 (stage 0, node1) has been running exit 1 of microbatch 3 of step 5 for 41 s and waits for nobody, at stage.py:12",
        "rank 0 (stage 0, node1) has been reading the data of step 5 for 2 s and waits for nobody, at stage.py:12",
        "rank 1 (stage 1, node1) has been running visit 2 of microbatch 0 of step 5 for 40 s and waits for rank 3",
    ]


@pytest.mark.parametrize(
    ("waits", "silent", "expected"),
    [
        ({0: (0, 1, 2), 1: (0, 1, 2), 2: ()}, set(), "rank 2"),  # two in a sum over all, one not yet
        ({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2)}, set(), "ranks 1, 2"),  # all of them: it is the sum that hangs
        ({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2)}, {2}, "rank 2"),
        ({0: (1,), 1: (2,), 2: ()}, set(), "rank 1"),  # a chain: each its own neighbour
        ({0: (1,), 1: (0,)}, set(), "rank 1"),
        ({0: tuple(range(9)), **{r: () for r in range(1, 9)}}, set(), "ranks 1, 2, 3, 4, 5, 6 and 2 more"),
        ({0: (0, 1)}, set(), "rank 1"),  # which has never reported
    ],
)
def test_a_rank_waits_for_those_that_do_not_wait_for_it(waits, silent, expected):
    reports = {rank: report("adding up", 5, others) for rank, others in waits.items()}
    (line,) = [line for line in who_waits(reports, silent, 1001.0) if line.startswith("rank 0 ")]
    assert line == f"rank 0 (stage 0, node1) has been adding up for 5 s and waits for {expected}"


def test_the_alarm_rings_when_it_is_late_and_again_when_it_is_twice_as_late():
    """A step that takes 200 s, looked at each second; rank 1 falls silent at 90 s."""
    alarm, told = Alarm(after=20), {}

    def at(second: int) -> dict[int, Report]:
        return {0: report("adding up", second, (1,), number=second), 1: report("running", second, number=min(second, 90))}

    for second in range(200):
        if text := alarm.look(("step 4", 0.0), second, lambda second=second: at(second)):
            told[second] = text
    first, then, last = 20 + LISTENING, 2 * (20 + LISTENING) + LISTENING, 2 * (2 * (20 + LISTENING) + LISTENING) + LISTENING
    assert list(told) == [first, then, last]
    assert told[first].splitlines()[0] == "step 4 has taken 23 s so far; the likely cause first:"
    assert [line.split(" (")[0] for line in told[first].splitlines()[1:]] == ["  rank 1", "  rank 0"]
    assert "waits for nobody" in told[then] and "rank 1 (stage 0, node1) has not reported" in told[last]


def test_the_alarm_is_quiet_while_steps_go_on_and_counts_anew_for_each():
    alarm = Alarm(after=20)
    reports = {0: report("adding up", 5)}
    began = [15.0 * step for step in range(10)]
    for step, start in enumerate(began):
        for second in range(15):
            assert alarm.look((f"step {step}", start), start + second, lambda: reports) is None
    late = [s for s in range(15, 30) if alarm.look((f"step {len(began) - 1}", began[-1]), began[-1] + s, lambda: reports)]
    assert late == [20 + LISTENING]


def sampled(mesh: Mesh) -> list[tuple[tuple[int, ...], str]]:
    """Where this rank is while another comes late to a sum over the pair it belongs to, seen from a thread of its own."""
    import threading

    found: list[tuple[tuple[int, ...], str]] = []
    own, over = threading.get_ident(), threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            found.append(whereabouts(own))

    thread = threading.Thread(target=look)
    thread.start()
    if mesh.rank == 3:
        time.sleep(1.5)
    import torch

    meshes.sum_over_replicas(torch.ones(1))
    over.set()
    thread.join()
    return found


@pytest.mark.ranks
def test_a_collective_is_seen_from_outside_with_the_ranks_of_its_group(ranks):
    from loopscale.config.tree import ParallelConfig

    found = ranks.run(sampled, 4, parallel=ParallelConfig(tensor=2))  # replicas: ranks 0 and 2, 1 and 3
    assert ((1, 3), "distributed_c10d.py") in {(group, at.split(":")[0]) for group, at in found[1]}
    assert {group for group, at in found[3] if at.startswith("test_reports.py")} == {()}
