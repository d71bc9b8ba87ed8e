"""What the inspection of a checkpoint says, against what was put in."""

from __future__ import annotations

import json
import math

import pytest
import torch
from rich.console import Console

from loopscale.checkpoint import inspect, store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import Piece
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError, UsageError
from tests.checkpoint.sealed import changed

NAMES = {"weight/a": (6, 4), "weight/b.c": (5,), "exp_avg/a": (6, 4)}


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draw) for name, shape in NAMES.items()}


def save(folder, step, values, state=None, config="model: {heads: 2}\n"):
    """Each tensor in two boxes."""
    pieces = []
    for name, value in values.items():
        for first, half in ((0, value[:2]), (2, value[2:])):
            pieces.append(Piece(name, tuple(value.shape), (first, 0)[: value.dim()], half))
    store.save(Folder(folder), store.Snapshot(step, pieces, state or {"step": 1}, {"config.yaml": config}, {"validation": 2.5}))
    return folder / f"step-{step}"


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(inspect, "SLICE", 8)  # two rows of a, and not as the boxes are cut


def test_norms_counts_and_totals_are_those_of_the_tensors(mesh, tmp_path, small_slices):
    values = tensors()
    values["weight/a"][1, 2], values["weight/a"][5, 0], values["exp_avg/a"][0, 0] = math.nan, -math.inf, -50.0
    found = inspect.inspect(save(tmp_path, 1, values), Silent())
    assert {t.name: (t.shape, t.bytes, t.boxes, t.files) for t in found.tensors} == {
        name: (shape, 4 * math.prod(shape), 2, 1) for name, shape in NAMES.items()
    }
    for t in found.tensors:
        finite = values[t.name][values[t.name].isfinite()].double()
        assert t.norm == pytest.approx(float(finite.norm()), rel=1e-12)
        assert t.largest == float(finite.abs().max())
    assert [t.non_finite for t in found.tensors] == [2, 0, 0]
    weights, moments = found.kinds
    assert (weights.kind, weights.tensors, weights.elements, weights.bytes, weights.non_finite) == ("weight", 2, 29, 116, 2)
    assert weights.norm == pytest.approx(math.hypot(*(t.norm for t in found.tensors[:2])))
    assert (moments.kind, moments.largest) == ("exp_avg", 50.0)
    assert (found.format, found.facts, found.state, found.verified) == (2, {"validation": 2.5}, {"step": 1}, True)
    printed = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    inspect.show(found, printed)
    assert "weight/b.c" in printed.export_text()


def test_equal_checkpoints_are_equal_however_they_are_cut(mesh, tmp_path, small_slices):
    values = tensors()
    values["weight/b.c"][0] = math.nan
    first = save(tmp_path / "a", 1, values)
    whole = [Piece(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in values.items()]
    snapshot = store.Snapshot(2, whole, {"step": 1, "elapsed": 9.0, "run_id": "b"}, {"config.yaml": "model: {heads: 4}\n"})
    store.save(Folder(tmp_path / "b"), snapshot)
    found = inspect.compare(first, tmp_path / "b" / "step-2", Silent())
    assert found.same
    assert [t.differing for t in found.tensors] == [0, 0, 0]
    assert found.config == (("model.heads", 2, 4),)


def test_differences_are_told_in_elements_and_norms(mesh, tmp_path, small_slices):
    values, others = tensors(), tensors()
    others["weight/a"][3, 1] += 0.5
    others["weight/a"][4, 2] -= 0.25
    others["exp_avg/a"][0, 0] = -0.0
    values["exp_avg/a"][0, 0] = 0.0  # another bit, the same number
    found = inspect.compare(save(tmp_path / "a", 1, values), save(tmp_path / "b", 1, others), Silent())
    assert not found.same
    a, b, moment = found.tensors
    assert (a.differing, b.differing, moment.differing) == (2, 0, 1)
    between = values["weight/a"].double() - others["weight/a"].double()
    assert a.relative == pytest.approx(float(between.norm() / others["weight/a"].double().norm()), rel=1e-12)
    assert a.largest == pytest.approx(0.5, rel=1e-6)
    assert (moment.relative, moment.largest) == (0.0, 0.0)


def test_what_one_side_has_alone_and_other_shapes_and_counters_count(mesh, tmp_path):
    values = tensors()
    first = save(tmp_path / "a", 1, values)
    for change, key in (
        ({"weight/d": torch.ones(3)}, "only"),
        ({"weight/b.c": torch.ones(4)}, "shapes"),
    ):
        found = inspect.compare(first, save(tmp_path / "b", 1, {**values, **change}), Silent())
        assert not found.same
        assert json.loads(inspect.as_json(found))[key] == {
            "only": [[], ["weight/d"]], "shapes": [["weight/b.c", [5], [4]]],
        }[key]  # fmt: skip
    found = inspect.compare(first, save(tmp_path / "c", 1, values, {"step": 2}), Silent())
    assert not found.same
    assert found.state == (("step", 1, 2),)
    assert inspect.compare(first, first, Silent(), pattern="weight/*").same


def test_json_has_no_number_that_is_none(mesh, tmp_path):
    values, others = tensors(), tensors()
    values["weight/a"][0, 0] = math.inf
    found = inspect.compare(save(tmp_path / "a", 1, values), save(tmp_path / "b", 1, others), Silent())
    assert json.loads(inspect.as_json(found))["tensors"][0]["largest"] == "inf"
    assert json.loads(inspect.as_json(inspect.inspect(tmp_path / "a" / "step-1", Silent())))["kinds"][0]["non_finite"] == 1


def test_damage_a_wrong_digest_and_a_filter_without_a_match_are_refused(mesh, tmp_path):
    checkpoint = save(tmp_path, 1, tensors())
    with pytest.raises(UsageError, match=r"--filter 'weight/z\*' matches no tensor; names are like weight/a"):
        inspect.inspect(checkpoint, Silent(), pattern="weight/z*")
    with changed(checkpoint, "tensors/index.json") as index:
        index["weight/a"]["digest"] = "0" * 16
    with pytest.raises(CheckpointError, match="weight/a has other elements than its digest says"):
        inspect.inspect(checkpoint, Silent())
    assert not inspect.inspect(checkpoint, Silent(), verify=False).verified
    (checkpoint / "config.yaml").write_text("x")
    with pytest.raises(CheckpointError, match=r"config\.yaml has 1 bytes"):
        inspect.inspect(checkpoint, Silent())
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        inspect.inspect(tmp_path, Silent())
