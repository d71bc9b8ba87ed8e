"""A growing norm is told where no loss sees it, once and again at each further factor."""

from __future__ import annotations

import pytest

from loopscale.config import Config
from loopscale.config.tree import DepthConfig
from loopscale.train.blind_spot import BlindSpot, is_blind

BLIND = {"inject": "none", "state_init": "embedding", "prelude_layers": 0, "coda_layers": 0, "readout": "rmsnorm"}


def configured(objective: dict | None = None, **model) -> Config:
    depth = {"prior": "fixed", "mean": 2}
    return Config.model_validate({"model": BLIND | model, "objective": {"kind": "per_loop"} | (objective or {}), "depth": depth})


def test_one_line_names_loss_readout_growth_and_remedies():
    spot = BlindSpot(configured())
    assert spot.see(100, [1.0, 2.0]) is None
    assert spot.see(200, [1.0, 15.9]) is None
    assert spot.see(300, [1.0, 36.0]) == (
        "blind spot: per-loop loss through an rmsnorm readout cannot see the state's scale, which has grown 18x since step 100; "
        "remedy: objective.norm_penalty=0.01, model.readout=raw or model.between=rmsnorm"
    )


def test_it_is_told_again_at_each_further_factor_alone():
    spot = BlindSpot(configured({"kind": "terminal"}))
    norms = [1, 7.9, 8.1, 9, 64, 64.9, 10, 600, 500, 500]
    assert [step for step, norm in enumerate(norms) if spot.see(step, [1, norm])] == [2, 5, 7]


def test_a_norm_that_has_come_to_rest_or_a_shallow_step_is_not_told():
    spot = BlindSpot(configured())
    spot.see(1, [1.0, 1.0])
    spot.see(2, [1.0, 7.0])
    assert spot.see(3, [90.0]) is None  # no sequence reached depth 2
    before = [{"step": step, "state_norm": [1.0, norm]} for step, norm in ((1, 1.0), (2, 10.0), (3, 20.0))]
    resumed = BlindSpot(configured(), [{"step": 0}, *before])
    assert resumed.see(4, [1.0, 30.0]) is None  # told at step 2
    assert resumed.see(5, [1.0, 81.0]) is not None
    assert BlindSpot(configured(), before[:1]).see(4, [1.0, 1.0]) is None


@pytest.mark.parametrize(
    ("objective", "model", "blind"),
    [
        ({}, {}, True),
        ({"kind": "terminal"}, {}, True),
        ({"kind": "terminal"}, {"readout": "final_only"}, True),
        ({}, {"readout": "final_only"}, False),
        ({}, {"readout": "raw"}, False),
        ({}, {"readout": "alpha"}, False),
        ({"norm_penalty": 0.01}, {}, False),
        ({"anchor": 0.1}, {}, False),
        ({}, {"between": "rmsnorm"}, False),
        ({}, {"between": "shared"}, False),
        ({}, {"between": "damping"}, True),
        ({}, {"inject": "ortho", "state_init": "normal"}, True),
        ({}, {"coda_layers": 1}, False),  # its residual sees the scale
        ({}, {"coda_layers": 1, "coda_norm": True}, True),
        ({"kind": "exit_gate"}, {"exit_gate": "raw"}, False),
    ],
)
def test_who_is_blind(objective, model, blind):
    assert is_blind(configured(objective, **model)) is blind


@pytest.mark.ranks
def test_a_run_warns_and_a_resumed_one_knows(runs):
    """At a learning rate of 0.3 the norms of a blind run grow by more than 8 within some steps."""
    own = [f"model.{key}={value}" for key, value in BLIND.items()]
    own += ["objective.kind=per_loop", "optimizer.lr=0.3", "depth.prior=fixed", "depth.backprop=null", "diagnostics.every=0"]
    runs.train("blind", *own, "train.steps=15", "optimizer.schedule=constant")
    runs.train("blind", *own, "train.steps=20", "optimizer.schedule=constant", options=["--resume", "auto"])
    records, config = runs.records("blind"), configured().model_copy(update={"depth": DepthConfig(prior="fixed", mean=3)})
    spot = BlindSpot(config)  # in one piece
    expected = [r["step"] for r in records if spot.see(r["step"], r["state_norm"])]
    told = [e["step"] for e in runs.journal("blind") if e["kind"] == "warning" and e["message"].startswith("blind spot: ")]
    assert told == expected
    assert 1 < told[0] < 15
    assert records[-1]["step"] == 20


@pytest.mark.ranks
def test_growth_before_the_second_line_is_told(runs):
    own = [f"model.{key}={value}" for key, value in BLIND.items()]
    own += ["objective.kind=per_loop", "optimizer.lr=0.3", "depth.prior=fixed", "depth.backprop=null", "diagnostics.every=0"]
    runs.train("seldom", *own, "train.steps=10", "log.every=10", "optimizer.schedule=constant")
    first, last = runs.records("seldom")
    growth = last["state_norm"][-1] / first["state_norm"][-1]
    assert (first["step"], last["step"]) == (1, 10) and growth > 8
    told = [e["message"] for e in runs.journal("seldom") if e["message"].startswith("blind spot: ")]
    assert len(told) == 1 and f"has grown {growth:.3g}x since step 1;" in told[0]


@pytest.mark.ranks
def test_the_norm_drifts_where_no_loss_sees_it_alone(runs):
    """Paper A in 24 steps: the same model with a raw readout, or with a penalty, keeps norms several times smaller."""
    own = [f"model.{key}={value}" for key, value in BLIND.items()]
    own += ["objective.kind=per_loop", "optimizer.lr=0.03", "depth.prior=fixed", "depth.backprop=null", "diagnostics.every=24"]
    for name, more in (("blind", []), ("raw", ["model.readout=raw"]), ("penalty", ["objective.norm_penalty=0.01"])):
        runs.train(name, *own, "train.steps=24", *more)
    scales = {name: runs.records(name)[-1]["scale"] for name in ("blind", "raw", "penalty")}
    norms = {name: scale["norms"]["mean"][-1] for name, scale in scales.items()}
    assert norms["blind"] > 4 * max(norms["raw"], norms["penalty"])
    assert max(scales["blind"]["radial_fraction"]) < 1e-6 and min(scales["raw"]["radial_fraction"]) > 1e-3
    told = {name: any("blind spot" in e["message"] for e in runs.journal(name)) for name in scales}
    assert told == {"blind": True, "raw": False, "penalty": False}
