"""What a run reads and does on held-out sequences beside its steps leaves no trace in what it trains."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.ranks


def test_a_diagnosis_is_recorded_and_changes_nothing(runs):
    """Twelve sequences a diagnosis, in several microbatches; losses and weights are the same to the last bit."""
    runs.train("without", "train.steps=12", "diagnostics.every=0", "checkpoint.every=12")
    runs.train("with", "train.steps=12", "diagnostics.every=5", "diagnostics.sequences=12", "checkpoint.every=12", "log.every=3")
    plain, records = ({r["step"]: r for r in runs.records(name)} for name in ("without", "with"))
    assert sorted(records) == [1, 3, 5, 6, 9, 10, 12]
    assert {s: r["loss"] for s, r in records.items()} == {s: plain[s]["loss"] for s in records}
    expected, found = runs.weights("without", 12), runs.weights("with", 12)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [step for step, record in records.items() if "equilibrium" in record] == [5, 10]
    assert not any("equilibrium" in record for record in plain.values())
    equilibrium = records[10]["equilibrium"]
    assert equilibrium["depth"] == 3
    assert 0.01 < equilibrium["contraction"] < 2
    assert set(equilibrium["truncation"]) == {"1", "2"}
    assert 1 > equilibrium["truncation"]["1"]["error"] > equilibrium["truncation"]["2"]["error"] > 0
    assert len(equilibrium["change"]) == len(equilibrium["converged"]) == 6
    told = [e["message"] for e in runs.journal("with") if e["kind"] == "equilibrium"]
    assert len(told) == 2
    assert told[1].startswith(f"contraction {equilibrium['contraction']:.2f} · gradient error b=1 ")
    assert told[1].endswith(f"{equilibrium['converged'][-1]:.0%} of tokens converged at depth 6")
    seen = [record["scale"] for record in records.values() if "scale" in record]
    assert len(seen) == len([e for e in runs.journal("with") if e["kind"] == "scale"]) == 2
    assert seen[1]["depth"] == len(seen[1]["radial_fraction"]) == len(seen[1]["norms"]["mean"]) == 3
    assert seen[1]["scaled_loss"]["1"] == seen[1]["loss"]
    for record in records.values():
        assert len(record["state_converged"]) == len(record["state_change"])
        assert all(0 <= share <= 1 for share in record["state_converged"][1:])


def test_fewer_sequences_than_replicas_become_one_each(runs):
    short = ["train.steps=2", "diagnostics.every=2"]
    runs.train("alone", *short, "diagnostics.sequences=2")
    runs.train("pair", *short, "diagnostics.sequences=1", ranks=2)
    expected, found = (runs.records(name)[-1]["equilibrium"] for name in ("alone", "pair"))
    assert found["contraction"] == pytest.approx(expected["contraction"], rel=1e-3)
    for b, error in expected["truncation"].items():
        assert found["truncation"][b] == pytest.approx(error, rel=1e-3)
    assert found["change"][1:] == pytest.approx(expected["change"][1:], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "truncations"),
    [
        (["model.inject=none", "model.state_init=embedding", "depth.backprop=null"], None),
        (["model.exit_gate=raw", "objective.kind=exit_gate_stage2", "depth.prior=fixed"], None),
        (["model.exit_gate=raw", "objective.kind=exit_gate", "depth.backprop=2"], {"1", "2"}),
        (["objective.kind=per_loop", "objective.norm_penalty=0.1"], {"1", "2"}),
    ],
    ids=["no injection", "gate alone", "gate", "per loop"],
)
def test_gradients_are_compared_wherever_the_loop_is_trained_by_truncated_ones(runs, overrides, truncations):
    runs.train("any", "train.steps=1", "diagnostics.every=1", *overrides)
    found = runs.records("any")[-1]["equilibrium"]
    assert set(found) - {"truncation"} == {"depth", "contraction", "change", "converged"}
    assert found.get("truncation", {}).keys() == (truncations or set())
    assert ("radial_fraction" in runs.records("any")[-1]["scale"]) == ("objective.kind=exit_gate_stage2" not in overrides)
    for error in found.get("truncation", {}).values():
        assert 0 < error["error"] < 1
        assert 0 < error["cosine"] <= 1


def test_a_model_without_a_loop_is_not_diagnosed(runs):
    runs.train("one", "train.steps=1", "diagnostics.every=1", "depth.prior=fixed", "depth.mean=1")
    assert not {"equilibrium", "scale"} & runs.records("one")[-1].keys()
