"""The picture of a plan: every operation is a box, whatever the size of the ring."""

from __future__ import annotations

import pytest
from matplotlib.collections import PolyCollection

from loopscale.errors import UsageError
from loopscale.parallel.ring.plan import Costs, Work, plan
from loopscale.plan.draw import draw, figure


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 8), (2, 8), (4, 2), (8, 32)])
def test_every_operation_is_a_box_within_the_makespan(stages, microbatches):
    ring = plan(stages, [Work(1 + m % 5, 1 + m % 3 if m % 5 > 1 else 1, (1 + m % 5,)) for m in range(microbatches)])
    page = figure(ring, 1.0, (0, *[1] * (stages - 1)))
    axes = page.axes[0]
    boxes = [c for c in axes.collections if isinstance(c, PolyCollection) and len(c.get_facecolors()) > 1]
    assert [len(c.get_paths()) for c in boxes] == [len(operations) for operations in ring.operations]
    assert axes.get_xlim() == (0, ring.makespan)
    for stage, collection in enumerate(boxes):
        corners = [tuple(corner) for path in collection.get_paths() for corner in path.vertices]
        assert all(0 <= x <= ring.makespan * (1 + 1e-9) and abs(y - stage) < 0.5 for x, y in corners)
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["home\n0 core layers", "stage 1\n1 core layer"][:stages]


def test_the_title_tells_the_finding():
    ring = plan(1, [Work(2, 1, (2,)), Work(5, 5, (5,))])
    title = figure(ring, 1.0, (3,)).texts[0].get_text()
    assert title == "2 microbatches of depth 2–5 on 1 stage: 1.00 × the bound, home idle 0%"


def test_operations_that_take_no_time_do_not_blow_the_picture_up():
    costs = Costs(prelude=0.0, visit=(0.0, 1.0), visit_backward=(0.0, 2.0), exit=1.0, prelude_backward=0.0)
    page = figure(plan(2, [Work(3, 3, (3,))] * 2, costs=costs), 1.0, (0, 1))
    assert 9 < page.get_figwidth() < 21


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_a_suffix_is_a_format(tmp_path, suffix):
    draw(plan(2, [Work(2, 2, (2,))] * 2), tmp_path / f"plan{suffix}", layer=1.0, slices=(1, 1))
    assert (tmp_path / f"plan{suffix}").stat().st_size > 1000


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"plan\.txt: the name must end in \.png, \.svg or \.pdf"):
        draw(plan(1, [Work(1, 1, (1,))]), tmp_path / "plan.txt", layer=1.0, slices=(1,))
