"""What `loopscale plan` says."""

from __future__ import annotations

import re

import pytest

from loopscale.depth import DepthLaw, draw_depths
from loopscale.errors import UsageError
from loopscale.model.ring import draws_at, work_of, works_at
from loopscale.parallel.ring.plan import Work
from loopscale.plan.layout import Layout
from loopscale.plan.ring import plan_report


def line(report: str, name: str) -> str:
    return next(said.removeprefix(name).strip() for said in report.splitlines() if said.startswith(name))


def works(layout: Layout, step: int) -> list[Work]:
    config, batch = layout.config, layout.batch
    return list(works_at(config, batch, draws_at(config, batch, DepthLaw(config.depth), step)))


def test_a_replica_runs_every_group_in_its_own_microbatches(config):
    asked = config(batch={"global_batch": 96, "microbatch": 2}, depth={"groups": 4}, parallel={"pipeline": 2})
    draws = draw_depths(DepthLaw(asked.depth).at(7 / asked.train.steps), asked.run.seed, 7, 4)
    expected = [work_of(asked, r) for r in draws for _ in range(6)]
    assert works(Layout.of(asked, 1, 4), 7) == expected
    assert works(Layout.of(asked, 1, 4), 8) != expected


def test_a_group_of_sequences_with_their_own_depths_runs_to_the_deepest(config):
    asked = config(depth={"groups": 4, "per_sequence": True})
    draws = draw_depths(DepthLaw(asked.depth).at(0.0), asked.run.seed, 0, 32)
    assert [w.depth for w in works(Layout.of(asked), 0)] == [max(draws[i : i + 8]) for i in (0, 8, 16, 24)]


def test_depths_follow_the_curriculum(config):
    asked = Layout.of(config(depth={"groups": 32, "curriculum": 1.5, "mean": 20.0}, train={"steps": 100}))
    early, late = (sum(w.depth for w in works(asked, step)) / 32 for step in (0, 99))
    assert early < 3 < 12 < late


def test_the_report_of_a_ring(config):
    asked = config(model={"hidden_size": 64}, depth={"prior": "fixed", "mean": 4, "backprop": 3}, parallel={"pipeline": 4})
    report = plan_report(asked)
    assert line(report, "layout") == "TP 1 × PP 4 × DP 1 · 4 ranks"
    assert line(report, "step") == "0 · 8 microbatches of 4 sequences on each replica · depth 4 (×8) · mean 4"
    operations = 8 * (4 * (4 + 3) + 3)
    assert re.fullmatch(rf"at most 8 in flight · {operations} operations · plan [0-9a-f]{{12}}", line(report, "ring"))
    assert re.match(r"1\.\d{3} × the lower bound · \d+ forwards of a core layer", line(report, "makespan"))
    assert line(report, "kept").endswith("limit 8 in flight × 3 with gradient = 24")
    assert line(report, "traffic").endswith(f"4 hops round the ring · {4 * 64 * 4 * (4 + 3):,} bytes a token over the step")
    assert "note" not in report


def test_positions_that_are_divided_divide_what_travels(config):
    ring = {"tensor": 2, "pipeline": 2}
    whole, divided = (plan_report(config(parallel={**ring, "sequence_parallel": sp})) for sp in (False, True))
    assert line(whole, "traffic").startswith("512 bytes a token for every visit and hop on each of 2 tensor-parallel ranks")
    assert line(divided, "traffic").startswith("256 bytes")


def test_one_stage_has_nothing_to_wait_for(config):
    report = plan_report(config())
    assert line(report, "makespan").startswith("1.000 ×")
    assert line(report, "idle") == "home: 0.0%"
    assert line(report, "traffic").startswith("none")


def test_fewer_microbatches_than_stages_are_said_to_idle(config):
    report = plan_report(config(depth={"groups": 2}, parallel={"pipeline": 4}))
    note = line(report, "note")
    assert re.match(r"2 microbatches on 4 stages: works; the idle share is \d\d%; more microbatches", note)
    idle = [float(share) for share in re.findall(r"([\d.]+)%", line(report, "idle"))]
    assert min(idle) <= float(re.search(r"(\d+)%", note)[1]) <= max(idle)


def test_slices_that_the_run_will_measure_are_called_counted(config):
    report = plan_report(config(parallel={"pipeline": 2, "slices": "measured"}))
    assert line(report, "slices").endswith("(counted; the run will time them)")


def test_a_step_that_the_run_has_not_is_refused(config):
    with pytest.raises(UsageError, match=r"--step is 10; the run has steps 0 to 9 \(train\.steps 10\)"):
        plan_report(config(train={"steps": 10}), step=10)


def test_a_drawing_needs_a_folder(config, tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        plan_report(config(), drawing=tmp_path / "missing" / "ring.svg")
