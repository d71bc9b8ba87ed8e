"""Which nodes are called sick, from what their ranks found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscale.cluster.judge import Facts, judge, refusal
from loopscale.config.cluster import PreflightConfig

NODES = ("a", "b", "c", "d")
SETTINGS = PreflightConfig()
FIT = Facts(
    host="a", versions={"python": "3.11.4", "torch": "2.14.1"}, code="c0de", disk=100e9, shm=8e9, sees_run=True,
    address="10.0.0.1", matmul=1e12, received=1e9,
)  # fmt: skip


def crew(**odd: dict) -> dict[int, Facts]:
    """Facts of four nodes with two devices; ``odd`` says what differs on a rank, as r3={...}."""
    facts = {rank: replace(FIT, host=NODES[rank // 2], received=FIT.received if rank % 2 == 0 else None) for rank in range(8)}
    return facts | {int(rank[1:]): replace(facts[int(rank[1:])], **what) for rank, what in odd.items()}


@pytest.mark.parametrize(
    ("odd", "sick"),
    [
        ({}, {}),
        ({"r3": {"versions": {"python": "3.11.4", "torch": "2.13.0"}}}, {"b": ["torch is 2.13.0 here and 2.14.1 on a"]}),
        ({"r4": {"code": "other"}}, {"c": ["loopscale's files differ from those on a"]}),
        ({"r2": {"clock": -7.25}, "r3": {"clock": -4.9}}, {"b": ["its clock is -7.2 s from that of a (preflight.clock 5)"]}),
        ({"r6": {"disk": 19e9}}, {"d": ["the run's disk has 19.00 GB free, preflight.disk asks for 20"]}),
        ({"r0": {"shm": 64e6}, "r1": {"shm": 64e6}}, {"a": ["/dev/shm has 0.06 GB free, preflight.shm asks for 1"]}),
        (
            {"r5": {"sees_run": False}},
            {"c": ["the run's folder is not the one that the job was launched from; it must be on a shared disk"]},
        ),
        ({"r7": {"matmul": 0.69e12}}, {"d": ["device 1 multiplies at 69% of the median"]}),
        ({"r7": {"matmul": 0.71e12}}, {}),
        ({"r1": {"problems": ["torch sees 1 of its 2 GPUs"]}}, {"a": ["torch sees 1 of its 2 GPUs"]}),
        # b receives from a, and c from b: both links of b are slow
        ({"r2": {"received": 1e8}, "r4": {"received": 1e8}}, {"b": ["receives from a at 18% of the median link"]}),
        ({"r4": {"received": 2e8}}, {"c": ["receives from b at 20% of the median link"]}),
    ],
)
def test_a_sick_node_is_named_with_what_is_wrong(odd, sick):
    assert judge(NODES, 2, crew(**odd), {}, SETTINGS) == sick


def test_a_rank_that_has_not_come_is_told_with_what_is_known_of_it():
    facts = {rank: found for rank, found in crew().items() if rank not in (4, 5)}
    missing = {4: "ModuleNotFoundError: No module named 'torch'", 5: ""}
    assert judge(NODES, 2, facts, missing, SETTINGS) == {
        "c": ["rank 4 has not come within 60 s: ModuleNotFoundError: No module named 'torch'", "rank 5 has not come within 60 s"]
    }


def test_two_devices_do_not_tell_which_of_them_is_the_odd_one():
    facts = {0: replace(FIT, matmul=1e12), 1: replace(FIT, host="b", matmul=1e11)}
    assert judge(NODES[:2], 1, facts, {}, SETTINGS) == {}


@given(st.lists(st.floats(0.85, 1.15), min_size=8, max_size=8), st.integers(0, 7))
def test_noise_makes_nobody_sick_and_a_dead_slow_device_is_always_found(noise, slow):
    facts = {rank: replace(found, matmul=1e12 * noise[rank]) for rank, found in crew().items()}
    assert judge(NODES, 2, facts, {}, SETTINGS) == {}
    facts[slow] = replace(facts[slow], matmul=3e11)
    assert list(judge(NODES, 2, facts, {}, SETTINGS)) == [NODES[slow // 2]]


def test_spares_stand_in_for_sick_nodes_while_there_are_enough():
    sick = {"b": ["its clock is late"]}
    assert refusal(NODES, sick, 3) is None
    assert refusal(NODES, sick, 4) == "3 of 4 nodes are fit, 4 needed; b: its clock is late"
