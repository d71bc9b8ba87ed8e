"""Looped models of plain ones: their layers lie where the plan says, and the loop begins as the stack that it is made of."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loopscale
from loopscale.cli import main
from loopscale.config import Config, from_values
from loopscale.convert.retrofit import INJECTIONS, Plan, plan
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError, UsageError
from loopscale.train.run import train
from loopscale.train.signals import StopRequest
from tests.convert.folders import exported, toy, weights_in
from tests.convert.test_llama import TOKENS, llama, logits
from tests.corpus.conftest import built, texts, write_jsonl

LAYERS = 7


def retrofitted(folder: Path, layers: str, depth: int = 3, inject: str = "huginn_linear", **changes) -> torch.nn.Module:
    """The plain model that `ours` was made of."""
    theirs = llama(folder / "theirs", num_hidden_layers=LAYERS, **changes)
    import_(folder / "theirs", None, folder / "ours", Silent(), retrofit=partial(plan, layers, depth, inject))
    return theirs


def own_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {n.removeprefix("weight/"): t for n, t in weights_in(checkpoint).items()}


def stacked(theirs: torch.nn.Module, layers: list[int]) -> torch.Tensor:
    """Logits of the plain model with those layers, by transformers."""
    own = theirs.model.layers
    theirs.model.layers, theirs.config.num_hidden_layers = torch.nn.ModuleList(own[i] for i in layers), len(layers)
    try:
        with torch.no_grad():
            return theirs(TOKENS, use_cache=False).logits
    finally:
        theirs.model.layers, theirs.config.num_hidden_layers = own, len(own)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_counts_take_the_first_the_last_and_those_before_the_last(prelude, core, coda, left):
    found = plan(f"{prelude}/{core}/{coda}", 2, "none", prelude + core + coda + left)
    once = found.stack(1)
    assert [len(part) for part in found.layers] == [prelude, core, coda]
    assert once == tuple(i for i in range(prelude + left + core + coda) if not prelude <= i < prelude + left)
    named = "/".join(f"{part[0]}-{part[-1]}" if part else "" for part in found.layers)
    assert plan(named, 2, "none", prelude + core + coda + left) == found


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_stack_goes_through_the_core_as_often_as_it_is_visited(visits, more):
    found = plan("1/2/1", 2, "none", 5)
    assert found.stack(visits) == (0, *(2, 3) * visits, 4)
    assert len(found.stack(visits + more)) - len(found.stack(visits)) == 2 * more


@pytest.mark.parametrize(
    "text",
    ["", "4", "4/8", "0/0/4", "4/8/4/2", "a/b/c", "5/5/5", "0-3//4-6", "0-3/3-2/4-6", "0-1/2-3/4-7", "0-1/5-7/", "-1/2-3/4-5"],
)
def test_layers_that_cannot_be_are_one_sentence(text):
    with pytest.raises(UsageError, match=rf"--retrofit is '?{re.escape(text)}'?(,|:|;) .*\d"):
        plan(text, 2, "none", LAYERS)


@pytest.mark.parametrize("inject", INJECTIONS)
@pytest.mark.parametrize("layers", ["1/2/1", "/1-3/4-5"])
def test_the_first_visit_is_the_stack_of_layers_whatever_is_injected(mesh, tmp_path, inject, layers):
    theirs = retrofitted(tmp_path, layers, inject=inject)
    ours = loopscale.load(tmp_path / "ours")
    once = [0, 4, 5, 6] if layers == "1/2/1" else [1, 2, 3, 4, 5]
    assert ours(TOKENS, depth=1).logits.sub(stacked(theirs, once)).abs().max() < 1e-4
    twice = [0, 4, 5, 4, 5, 6] if layers == "1/2/1" else [1, 2, 3, 1, 2, 3, 4, 5]
    same = ours(TOKENS, depth=2).logits.sub(stacked(theirs, twice)).abs().max() < 1e-4
    assert same == (inject in ("none", "huginn_linear"))  # the others come back to e


def test_later_visits_come_back_to_the_input_as_each_injection_says(mesh, tmp_path):
    """Of a core without effect: h + (1 - a)(e - h) stays at e."""
    retrofitted(tmp_path, "1/2/1", inject="diagonal")
    weights = own_weights(tmp_path / "ours")
    a = torch.exp(-torch.nn.functional.softplus(weights["inject.dt_bias"]) * weights["inject.A_log"].exp())
    step = torch.nn.functional.softplus(weights["inject.dt_bias"])
    torch.testing.assert_close(a + step * weights["inject.weight"].diagonal(), torch.ones(48))
    assert torch.equal(weights["inject.weight"], torch.diag(weights["inject.weight"].diagonal()))


def test_layers_are_where_the_plan_says_and_all_else_is_as_it_was(mesh, tmp_path):
    theirs = retrofitted(tmp_path, "0-1/3-4/6-6", tie_word_embeddings=True)
    given, ours = theirs.state_dict(), own_weights(tmp_path / "ours")
    for place, layer in {"prelude.0": 0, "prelude.1": 1, "core.0": 3, "core.1": 4, "coda.0": 6}.items():
        for own, name in {"out": "self_attn.o_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}.items():
            assert torch.equal(ours[f"{place}.{own}"], given[f"model.layers.{layer}.{name}.weight"])
    assert torch.equal(ours["embedding.tokens"], given["model.embed_tokens.weight"])
    assert torch.equal(ours["readout.norm"], given["model.norm.weight"])
    assert torch.equal(ours["inject.weight"], torch.eye(48, 96)) and "head" not in ours
    config = loopscale.load(tmp_path / "ours").config
    assert (config.depth.prior, config.depth.mean, config.depth.curriculum) == ("pln", 3.0, 1.1)


def test_a_layer_may_go_to_two_places(mesh, tmp_path):
    theirs = retrofitted(tmp_path, "0-2/2-4/4-6")
    ours = loopscale.load(tmp_path / "ours")(TOKENS, depth=2).logits
    assert ours.sub(stacked(theirs, [0, 1, 2, 2, 3, 4, 2, 3, 4, 4, 5, 6])).abs().max() < 1e-4


def test_all_layers_at_depth_1_are_the_model_itself(mesh, tmp_path):
    theirs = retrofitted(tmp_path, "2/3/2", depth=1)
    assert loopscale.load(tmp_path / "ours")(TOKENS, depth=1).logits.sub(logits(theirs)).abs().max() < 1e-4


def test_a_looped_model_is_not_looped_again(mesh, tmp_path):
    there = exported(tmp_path, "xllm")
    with pytest.raises(CheckpointError, match=r"of a plain one, and of this one depth\.deepest is 3, must be 1"):
        import_(there, None, tmp_path / "back", Silent(), retrofit=partial(plan, "1/1/1", 2, "none"))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"between": "unit"}, "model.between is unit, must be none"),
        ({"readout": "final_only"}, "model.readout is final_only, must be rmsnorm or raw or alpha"),
        ({"coda_linear": True}, "model.coda_linear is True, must be False"),
        ({"value_embeddings": True}, "model.value_embeddings is True, must be False"),
        ({"prelude_layers": 1, "core_layers": 3}, "model.prelude_layers is 1, must be 0"),
    ],
)
def test_what_a_loop_of_it_would_not_be_is_named(mesh, tmp_path, changes, wrong):
    there = tmp_path / "theirs"
    export(toy(tmp_path, "llama", **changes), "hf", there, Silent())
    with pytest.raises(CheckpointError, match=f"--retrofit makes a looped model of a plain one, and of this one {wrong}"):
        import_(there, None, tmp_path / "back", Silent(), retrofit=partial(plan, "1/1/1", 2, "none"))


def test_deep_ones_have_room_for_their_law(mesh, tmp_path):
    retrofitted(tmp_path, "1/2/1", depth=100)
    depth = loopscale.load(tmp_path / "ours").config.depth
    assert (depth.mean, depth.cap) == (100.0, 400)
    with pytest.raises(UsageError, match="--depth is 257, must be at most 256"):
        plan("1/2/1", 257, "none", LAYERS)


def test_the_command_line(mesh, tmp_path, capsys):
    llama(tmp_path / "theirs", num_hidden_layers=LAYERS)
    arguments = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main([*arguments, "--depth", "2"]) == 2
    assert "--depth and --inject are of a model that is looped by --retrofit" in capsys.readouterr().err
    assert main([*arguments, "--retrofit", "4/8/4"]) == 2
    assert "the core needs a layer, and the model has 7 for all three" in capsys.readouterr().err
    assert main([*arguments, "--retrofit", "1/2/1", "--to", "llama"]) == 2
    assert "leave out --to or those" in capsys.readouterr().err
    assert main([*arguments, "--retrofit", "1/2/1"]) == 0
    assert "logits of 32 random tokens at depth 1 and 2, computed in fp32" in capsys.readouterr().out
    config = loopscale.load(tmp_path / "ours").config
    assert (config.depth.mean, config.model.inject) == (4.0, "huginn_linear")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "llama"]) == 2
    assert "the model cannot be of the format llama: depth.evaluation_depth is 4, must be 1 there" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_run_goes_on_from_it_with_its_own_configuration(mesh, tmp_path, monkeypatch):
    """As the README says: config.yaml of what was written, and --init."""
    retrofitted(tmp_path, "1/2/1")
    monkeypatch.chdir(tmp_path)
    built(Path("corpus"), write_jsonl(Path("texts.jsonl"), texts(60)), tokenizer={"file": str(tmp_path / "ours/tokenizer.json")})
    config = loopscale.load(tmp_path / "ours").config
    changes = {
        "run": {"name": "on"}, "corpus": {"path": "corpus", "sequence_length": 16}, "batch": {"global_batch": 4},
        "optimizer": {"lr": 1e-12}, "train": {"steps": 40, "threads": 1}, "validation": {"every": 0, "sequences": 2},
        "log": {"every": 1, "wandb": "disabled", "tensorboard": False}, "checkpoint": {"every": 0}, "diagnostics": {"every": 0},
    }  # fmt: skip
    values = {section: {**own, **changes.get(section, {})} for section, own in config.model_dump().items()}
    outcome = train(from_values(Config, values), StopRequest(1), init=tmp_path / "ours")
    trained, given = own_weights(outcome.folder / "checkpoints" / "step-40"), own_weights(tmp_path / "ours")
    assert all((trained[n] - given[n]).abs().max() < 1e-8 for n in given)
    records = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    means = [record["prior"]["mean"] for record in records if "depths" in record]
    assert len(means) == 40 and 1.1 <= means[0] < 1.5 and means == sorted(means)
    assert means[10:] == pytest.approx([3.0] * 30)  # after a quarter of the steps


def test_a_plan_says_how_many_visits_are_those_of_the_stack():
    layers = ((0,), (1,), (2,))
    assert [Plan(layers, depth, "none").compared for depth in (1, 2, 5)] == [1, 2, 2]
    assert [Plan(layers, depth, "ortho").compared for depth in (1, 2, 5)] == [1, 1, 1]
