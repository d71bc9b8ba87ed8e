"""A checkpoint's diagnosis is what the run said of itself at that step."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from loopscale.cli import main
from loopscale.corpus.tokenizer import train_words
from loopscale.durable import finite
from loopscale.evaluate.perplexity import perplexity
from loopscale.evaluate.run import scored_bytes


@pytest.mark.ranks
def test_a_diagnosis_of_a_checkpoint_is_that_of_the_run(mesh, runs, threads_as_before, capsys):
    runs.train("model", "train.steps=10", "diagnostics.every=10")
    assert main(["eval", str(runs.path("model")), "--sequences", "4", "--depths", "3", "--batch", "3", "--diagnose"]) == 0
    written = json.loads(next((runs.path("model") / "evaluations").glob("*.json")).read_text())
    found, expected = written["equilibrium"], runs.records("model")[-1]["equilibrium"]
    assert found["depth"] == 3
    assert found["contraction"] == pytest.approx(expected["contraction"], rel=0.1)  # by twice as many iterations
    for b, error in expected["truncation"].items():
        assert found["truncation"][b] == pytest.approx(error, rel=1e-3)
    assert found["change"][1:] == pytest.approx(expected["change"][1:], rel=1e-3)
    assert found["converged"][1:] == pytest.approx(expected["converged"][1:], abs=0.02)
    found, expected = written["scale"], runs.records("model")[-1]["scale"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["radial_fraction"] == pytest.approx(expected["radial_fraction"], rel=1e-3)
    for name in ("mean", "max", "std"):
        assert found["norms"][name] == pytest.approx(expected["norms"][name], rel=1e-4)
    assert found["clamp"] == pytest.approx(expected["clamp"], abs=1e-5)
    shown = capsys.readouterr().out
    assert "equilibrium at depth 3" in shown and f"contraction {written['equilibrium']['contraction']:.3f} a visit" in shown
    assert f"{written['equilibrium']['truncation']['1']['error']:.4f}" in shown
    assert "norms of tokens by loop" in shown and "loss at depth 3 by scale" in shown and f"{found['clamp']['rms']:+.4f}" in shown


def test_bits_per_byte_are_told_where_every_scored_token_spells_its_bytes():
    tokenizer = train_words(["five words é"] * 2, 300)
    restored = SimpleNamespace(tokenizer=tokenizer)
    assert scored_bytes(restored, [sample(tokenizer, "five words é")]) == len("five words é".encode()) - len("five")
    assert scored_bytes(restored, [sample(tokenizer, "five other é")]) is None


def sample(tokenizer, text):
    """All but the first token scored."""
    ids = torch.tensor(tokenizer.encode(text).ids)
    return SimpleNamespace(targets=torch.cat((torch.tensor([-100]), ids[1:])))


def test_a_loss_beyond_all_numbers_has_an_infinite_perplexity_and_no_place_in_json():
    assert perplexity(math.log(7.5)) == pytest.approx(7.5) and perplexity(1e6) == math.inf and math.isnan(perplexity(math.nan))
    assert finite({"a": [math.inf, 1.0], "b": (math.nan, "x")}) == {"a": [None, 1.0], "b": [None, "x"]}
