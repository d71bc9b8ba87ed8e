"""Rules in both directions: nothing is lost, and rows lie where each format's code reads them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopscale.convert.formats import FORMATS
from loopscale.convert.mapping import Part, Rule, reordered
from loopscale.errors import UsageError
from loopscale.model.parameters import Weight
from tests.convert.toys import MODELS, config, weights

LAYOUTS = [{}, {"rope_interleaved": True}, {"rope_interleaved": False}, {"norm_centered": True}, {"norm_centered": False}]


def there(name, of, ours):
    """All tensors of theirs."""
    form = FORMATS[name]
    about = form.about(of)
    rules = form.rules(of, about)
    return about, rules, {rule.theirs: rule.out([ours[p.weight.name] for p in rule.parts]) for rule in rules}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_gives_every_bit_back(name, layout, tied):
    if name == "xllm" and tied:
        pytest.skip("its head is never tied")
    of = config(name, **layout, tied_head=tied)
    ours = weights(of)
    _, rules, theirs = there(name, of, ours)
    assert len(theirs) == len(rules) and all(tuple(theirs[r.theirs].shape) == r.shape for r in rules)
    back = {p.weight.name: t for r in rules for p, t in zip(r.parts, r.back(theirs[r.theirs]), strict=True)}
    assert back.keys() == ours.keys()  # each weight of ours once
    for rule in rules:
        for part in rule.parts:
            difference = float((back[part.weight.name] - ours[part.weight.name]).abs().max())
            assert difference <= (1.2e-7 if rule.added else 0.0), part.weight.name


@given(st.floats(2**-20, 2.0, width=32))
def test_a_gain_stored_less_one_is_rounded_by_6e_8_below_a_half_and_not_at_all_above(gain):
    rule = Rule("theirs", (Part(Weight("ours", (1,), "ones", "norm")),), added=-1.0)
    error = float((rule.back(rule.out([torch.tensor([gain])]))[0] - gain).abs())
    assert error <= (6e-8 if gain < 0.5 else 0.0)


@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(["pairs", "halves"]))
def test_the_rows_of_a_head_lie_as_its_positions_pair_them(heads, half, into):
    rows = torch.arange(heads * 2 * half)[:, None]
    other = "halves" if into == "pairs" else "pairs"
    assert torch.equal(reordered(reordered(rows, 2 * half, into), 2 * half, other), rows)
    halves = reordered(rows, 2 * half, "halves").view(heads, 2, half)  # of rows that lie in pairs
    assert torch.equal(halves[:, 0], rows.view(heads, half, 2)[..., 0])
    assert torch.equal(halves[:, 1], rows.view(heads, half, 2)[..., 1])


def test_fused_rows_lie_in_the_order_of_each_release():
    of = config("huginn")
    ours = weights(of)
    _, _, theirs = there("huginn", of, ours)
    at = "transformer.core_block.1"
    assert torch.equal(theirs[f"{at}.attn.Wqkv.weight"][48:96], ours["core.1.k"])
    assert torch.equal(theirs[f"{at}.attn.qk_bias"][1, 0], ours["core.1.k_bias"].view(4, 12))
    assert torch.equal(theirs[f"{at}.mlp.fc.weight"][:80], ours["core.1.gate"])
    assert torch.equal(theirs["transformer.adapter.weight"][:, :48], ours["inject.weight"][:, :48])  # the state's columns first
    of = config("parcae")
    about, _, theirs = there("parcae", of, weights(of))
    assert about["padded_vocab_size"] == 128 and not theirs["transformer.wte.weight"][101:].any()
    assert {n for n in theirs if n.startswith("value_embeds")} == {f"value_embeds.{i}.weight" for i in (1, 3, 5)}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_says_what_it_was_made_of(name):
    of = config(name)
    values = FORMATS[name].values(FORMATS[name].about(of))
    known = FORMATS[name].describes(FORMATS[name].about(of))
    assert known and [form.name for form in FORMATS.values() if form.describes(FORMATS[name].about(of))] == [name]
    for key, value in values["model"].items():
        stands = getattr(of.model, key)
        stands = {"kv_heads": of.model.key_value_heads, "head_dim": of.model.head_width}.get(key, stands) if value else stands
        assert (
            key == "init_scheme" or value == pytest.approx(stands)
            if isinstance(value, float)
            else value == stands or key == "init_scheme"
        ), key
    assert values["depth"]["mean"] == 3


@pytest.mark.parametrize(("of", "name"), [(a, b) for a in MODELS for b in MODELS if b not in (a, "hf")])
def test_a_model_of_another_design_is_refused_by_its_first_property(of, name):
    with pytest.raises(UsageError, match=rf"cannot be of the format {name}: (model\.\w+) is .+, must be .+ there"):
        FORMATS[name].refuse_unfit(config(of))
