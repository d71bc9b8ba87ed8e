# ruff: noqa: E501  (the tables of shapes and of mistakes read better one a line)
"""The shipped presets and toys load, weigh what their sources publish, and rules between the keys of all designs hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopscale.config import Config, from_values, load
from loopscale.config.tree import ModelConfig
from loopscale.errors import ConfigError
from loopscale.model.flops import Counts, count

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(p.stem for p in (CONFIGS / "presets").glob("*.yaml"))
TOYS = sorted(p.stem for p in (CONFIGS / "run").glob("toy-*.yaml"))
PUBLISHED = [
    "blindspot-44m", "blindspot-129m", "blindspot-1.4b", "fixedpoint-s", "fixedpoint-m", "fixedpoint-l", "huginn-3.5b",
    "parcae-140m", "parcae-370m", "parcae-770m", "parcae-1.3b", "ouro-1.4b", "ouro-2.6b",
]  # fmt: skip


def preset(name: str) -> Config:
    return load(Config, CONFIGS / "presets" / f"{name}.yaml").config


def toy(name: str) -> Config:
    return load(Config, CONFIGS / "run" / f"{name}.yaml").config


def counts(name: str) -> Counts:
    config = preset(name)
    return count(config.model, config.corpus.sequence_length)


# ---- presets


def test_every_published_design_is_a_preset():
    assert set(PUBLISHED) <= set(PRESETS)
    assert {name.split("-")[0] for name in PRESETS} == {name.split("-")[1] for name in TOYS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_settles_a_whole_run_and_names_its_source(name):
    path = CONFIGS / "presets" / f"{name}.yaml"
    loaded = load(Config, path)
    given = set(loaded.origins)
    sections = (
        "model.vocab_size",
        "depth.prior",
        "objective.kind",
        "optimizer.lr",
        "batch.global_batch",
        "corpus.sequence_length",
        "train.steps",
    )
    assert set(sections) <= given
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    named = "".join(path.read_text().splitlines()[:3])
    assert "arXiv" in named or "/" in named or "costs as many operations as" in named, "the first lines name the source"


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_is_its_preset_made_small(name):
    path = CONFIGS / "run" / f"{name}.yaml"
    base = next(line for line in path.read_text().splitlines() if line.startswith("base: "))
    small, large = toy(name), preset(Path(base.split()[1]).stem)
    kept = set(ModelConfig.model_fields) - {
        "vocab_size", "hidden_size", "heads", "kv_heads", "ffn_size", "prelude_layers", "core_layers", "coda_layers",
        "embedding_multiplier", "state_std", "init_depth",
    }  # fmt: skip
    assert {k: getattr(small.model, k) for k in kept} == {k: getattr(large.model, k) for k in kept}
    assert small.objective == large.objective
    assert (small.depth.prior, small.depth.per_sequence) == (large.depth.prior, large.depth.per_sequence)
    assert (small.model.vocab_size, small.model.hidden_size, small.corpus.path) == (None, 64, "data/sotu")
    assert (small.train.steps, small.batch.global_batch, small.corpus.sequence_length) == (50, 8, 64)


def test_noise_and_factors_follow_the_width():
    for name in PRESETS:
        _assert_scales(preset(name).model)
    for name in TOYS:
        _assert_scales(toy(name).model)


def _assert_scales(model: ModelConfig) -> None:
    if model.inject == "huginn_linear":
        assert model.embedding_multiplier == pytest.approx(model.hidden_size**0.5)
        assert model.noise_std == pytest.approx(0.4**0.5)
    if model.inject == "parcae":
        assert model.noise_std == pytest.approx((2 / (5 * model.hidden_size)) ** 0.5)


def test_token_budgets_and_rates():
    def tokens(name: str) -> float:
        config = preset(name)
        assert config.batch.global_batch is not None
        return config.batch.global_batch * config.corpus.sequence_length * config.train.steps

    published = {
        "fixedpoint-s": 21.47e9, "fixedpoint-m": 85.90e9, "fixedpoint-l": 343.6e9, "huginn-3.5b": 795e9, "ouro-1.4b": 7.7e12,
        "parcae-140m": 11.2e9, "parcae-370m": 29.6e9, "parcae-770m": 61.6e9, "parcae-1.3b": 104e9,
    }  # fmt: skip
    assert {name: tokens(name) for name in published} == pytest.approx(published, rel=1e-3)
    assert [preset(f"fixedpoint-{size}").optimizer.lr for size in "sml"] == [2e-3, 1.5e-3, 5e-4]
    huginn = preset("huginn-3.5b")
    assert round(huginn.optimizer.warmup * huginn.train.steps) == 4096
    assert huginn.optimizer.lr * huginn.optimizer.weight_decay == pytest.approx(4e-5)


@pytest.mark.parametrize(
    ("dense", "looped"),
    [(name, preset(name).model) for name in PRESETS if name.startswith("dense-")],
    ids=[name for name in PRESETS if name.startswith("dense-")],
)
def test_a_dense_baseline_has_the_effective_layers_of_its_looped_model(dense, looped):
    base = next(line for line in (CONFIGS / "presets" / f"{dense}.yaml").read_text().splitlines() if line.startswith("base: "))
    of = preset(base.removeprefix("base: ").removesuffix(".yaml"))
    assert looped.core_layers == of.model.prelude_layers + of.depth.evaluation_depth * of.model.core_layers + of.model.coda_layers
    assert (looped.prelude_layers, looped.coda_layers) == (0, 0)
    assert (of.batch, of.train, of.optimizer) == (preset(dense).batch, preset(dense).train, preset(dense).optimizer)
    own, unrolled = counts(dense), count(of.model, of.corpus.sequence_length)
    looped_matmuls = unrolled.prelude_matmul + of.depth.evaluation_depth * unrolled.core_matmul + unrolled.exit_matmul
    dense_matmuls = own.prelude_matmul + own.core_matmul + own.exit_matmul
    assert dense_matmuls == pytest.approx(looped_matmuls, rel=0.01)  # the injection's map is the difference


# ---- sizes


def test_blindspot_has_the_counted_sizes():
    assert round(counts("blindspot-44m").total / 1e6, 1) == 43.9
    assert round(counts("blindspot-129m").total / 1e6, 1) == 128.8


@pytest.mark.parametrize(
    ("name", "without_embeddings", "total"),
    [("fixedpoint-s", 0.106, 0.304), ("fixedpoint-m", 0.425, 0.819), ("fixedpoint-l", 1.699, 2.488)],
)
def test_fixedpoint_has_the_published_sizes(name, without_embeddings, total):
    found = counts(name)
    assert round((found.total - found.embedding) / 1e9, 3) == without_embeddings
    assert round(found.total / 1e9, 3) == total


def test_huginn_has_the_shapes_of_its_checkpoint():
    d, f, v, heads, width = 5280, 17_920, 65_536, 55, 96
    layer = 4 * d  # norm_1 to norm_4
    layer += 3 * d * d + d * d  # attn.Wqkv and attn.proj
    layer += 2 * heads * width  # attn.qk_bias [2, 1, 55, 96]
    layer += 2 * f * d + d * f  # mlp.fc (gate and up) and mlp.proj
    total = v * d  # wte, which is the head too
    total += 8 * layer + 2 * d * d + d  # two, four and two blocks; adapter [d, 2d]; ln_f
    found = counts("huginn-3.5b")
    assert found.total == total
    assert total == pytest.approx(3.5e9, rel=0.02)
    assert found.core // 1_000_000 == 1_581  # "1,581m parameters in recurrent block": recpre/model_registry.py


@pytest.mark.parametrize(
    ("name", "d", "heads", "layers", "named"),
    [
        ("parcae-140m", 768, 6, 2, 140e6), ("parcae-370m", 1024, 8, 4, 370e6),
        ("parcae-770m", 1280, 10, 6, 770e6), ("parcae-1.3b", 1536, 12, 8, 1.3e9),
    ],
)  # fmt: skip
def test_parcae_has_the_shapes_of_its_checkpoint(name, d, heads, layers, named):
    v, blocks = 32_768, 3 * layers
    block = 2 * d  # norm_1, norm_2
    block += 4 * d * d  # attn.c_q, c_k, c_v, c_proj
    block += 4 * d * d + 4 * d * d  # mlp.fc [4d, d] and mlp.proj [d, 4d]
    values = v * d + heads * 32  # value_embeds.i and attn.ve_gate, in every other block
    adapter = d + d + d * d  # A_log, dt_bias, B
    total = v * d + blocks * block + blocks // 2 * values + adapter  # wte, which is the head too
    total += d * d + d + d  # C, ln_prelude, ln_f
    assert counts(name).total == total
    assert total == pytest.approx(named, rel=0.05)  # the sources give no more than the names


@pytest.mark.parametrize(("name", "layers", "named"), [("ouro-1.4b", 24, 1.43e9), ("ouro-2.6b", 48, 2.6e9)])
def test_ouro_has_the_shapes_of_its_checkpoint(name, layers, named):
    d, f, v = 2048, 5632, 49_152
    layer = 4 * d * d + 3 * d * f + 4 * d  # q, k, v, o; gate, up, down; four norms
    total = 2 * v * d + layers * layer + d + (d + 1)  # embed_tokens and lm_head; model.norm; early_exit_gate
    assert counts(name).total == total
    assert total == pytest.approx(named, rel=0.03)


def test_the_check_at_scale_is_ouro_without_its_gate():
    assert counts("blindspot-1.4b").total == counts("ouro-1.4b").total - (2048 + 1)


# ---- rules between keys

GATED = "model: {inject: none, state_init: embedding, exit_gate: normed}\ndepth: {prior: fixed, mean: 4, backprop: null}\nobjective: {kind: exit_gate}"
WRONG = {
    "zeros that see no tokens": (
        "model: {inject: none, state_init: zero}\ndepth: {backprop: null}", "model.state_init", "zero with model.inject none would never see the tokens",
    ),
    "cut noise that sees no tokens": (
        "model: {inject: none, state_init: truncated_normal}\ndepth: {backprop: null}", "model.state_init", "use state_init embedding",
    ),
    "noise without a noisy state": ("model: {state_init: zero, state_std: 0.5}", "model.state_std", "is 0.5, but state_init zero has no noise; use state_std=null"),
    "a bias on another injection": ("model: {inject: parcae, inject_bias: true}", "model.inject_bias", "not of inject parcae; use inject_bias=false"),
    "a penalty on a frozen model": ("model: {exit_gate: raw}\ndepth: {prior: fixed}\nobjective: {kind: exit_gate_stage2, norm_penalty: 0.1}", "objective.norm_penalty", "has nothing to train while exit_gate_stage2 freezes"),
    "a shared norm that is not there": ("model: {between: shared, readout: raw}", "model.between", "readout is raw; use readout rmsnorm, or between rmsnorm"),
    "a shared norm that is there once": ("model: {between: shared, readout: final_only}", "model.between", "readout is final_only"),
    "a gate on a norm that is not there": (
        "model: {exit_gate: normed, readout: alpha}\nobjective: {kind: exit_gate}", "model.exit_gate", "readout alpha has none; use exit_gate raw",
    ),
    "too narrow for a value gate": ("model: {value_embeddings: true, hidden_size: 16}", "model.value_embeddings", "use hidden_size 32 or more"),
    "a depth that no scheme uses": ("model: {init_depth: 132}", "model.init_depth", "init_scheme normal does not use; use init_scheme scaled"),
    "a law without its table": ("depth: {prior: table}", "depth.table", "must be given for prior table"),
    "a table without its law": ("depth: {table: [0.5, 0.5]}", "depth.table", "would not be read under prior pln; use prior table"),
    "a table beyond the cap": ("depth: {prior: table, table: [1, 1, 1], cap: 2, mean: 2}", "depth.table", "has 3 entries, above depth.cap 2"),
    "the law of a run that is not there": ("depth: {prior: table, table: runs/nobody}", "depth.table", "is 'runs/nobody'; runs/nobody is no run folder: it has no metrics.jsonl"),
    "a learning rate of nothing that learns": ("depth: {prior: learned, lr: 1e+300}", "depth.lr", "must be a number, above 0, at most 100"),
    "a table of nothing": ("depth: {prior: table, table: [0, 0]}", "depth.table", "holds no probability above 0"),
    "a curriculum of a fixed depth": (
        "depth: {prior: fixed, curriculum: 2}", "depth.curriculum", "use prior poisson, lognormal_poisson or pln, or depth.curriculum=null",
    ),
    "a curriculum of a table": ("depth: {prior: table, table: [1], curriculum: 2}", "depth.curriculum", "that of prior table stays"),
    "a curriculum of a uniform law": ("depth: {prior: uniform, curriculum: 2}", "depth.curriculum", "that of prior uniform stays"),
    "a curriculum from beyond the cap": ("depth: {prior: poisson, curriculum: 70}", "depth.curriculum", "is 70, above depth.cap 64"),
    "a curriculum from no mean of pln": ("depth: {curriculum: 1}", "depth.curriculum", "a pln mean lies between 1 and depth.cap 64"),
    "a budget of a law that does not move": ("depth: {prior: pln, budget: flops}", "depth.budget", "flops belongs to prior learned, not to pln; use visits"),
    "a baseline of a law that does not move": ("depth: {baseline: leave_one_out}", "depth.baseline", "leave_one_out belongs to prior learned, not to pln; use moving"),
    "a group compared with itself": ("depth: {prior: learned, baseline: leave_one_out}", "depth.baseline", "leave_one_out compares groups, and depth.groups is 1; use moving"),
    "groups compared that depend on each other": (
        "depth: {prior: learned, groups: 2, baseline: leave_one_out, draws: antithetic}",
        "depth.baseline", "is biased where a group's draw depends on the others', as with draws antithetic",
    ),
    "a learned law of sequences": ("depth: {prior: learned, per_sequence: true}", "depth.per_sequence", "hides which depth of a group earned its loss"),
    "strata of one draw": ("depth: {draws: stratified}", "depth.draws", "stratified needs several draws a step; use depth.groups 2 or more"),
    "a uniform mean between halves": ("depth: {prior: uniform, mean: 4.3}", "depth.mean", "is 4.3; a uniform law over 1 to 2 mean - 1 has a whole or half-whole mean"),
    "a uniform law beyond the cap": ("depth: {prior: uniform, mean: 40}", "depth.mean", "reaches 79, above depth.cap 64; use a mean up to 32.5"),
    "a uniform law deeper than its gradient": (
        "model: {inject: none, state_init: embedding}\ndepth: {prior: uniform, mean: 3, backprop: 4}", "depth.backprop", "4 of up to 5 visits",
    ),
    "a table deeper than its gradient": (
        "model: {inject: none, state_init: embedding}\ndepth: {prior: table, table: [1, 1, 1, 0], backprop: 2}", "depth.backprop", "2 of up to 3 visits",
    ),
    "sequences of one depth": ("depth: {prior: fixed, per_sequence: true}", "depth.per_sequence", "same depth under prior fixed; use per_sequence=false"),
    "sequences that a gate cannot weigh": (
        "model: {exit_gate: raw}\ndepth: {prior: poisson, per_sequence: true}\nobjective: {kind: exit_gate}", "depth.per_sequence", "for exit_gate to supervise",
    ),
    "an objective without its gate": ("objective: {kind: exit_gate}", "objective.kind", "needs a gate; use model.exit_gate normed or raw"),
    "a gate without its objective": ("model: {exit_gate: raw}", "model.exit_gate", "raw gets no gradient from objective.kind terminal; use objective.kind exit_gate"),
    "a second stage at drawn depths": (
        "model: {exit_gate: raw}\nobjective: {kind: exit_gate_stage2}", "objective.kind", "use depth.prior fixed, mean and backprop 2 or more",
    ),
    "a second stage of one visit": (
        GATED + "\n", "objective.kind", "compares each visit with the one before", ["objective.kind=exit_gate_stage2", "depth.mean=1"],
    ),
    "a second stage with one supervised visit": (
        "model: {exit_gate: raw}\ndepth: {prior: fixed, mean: 4, backprop: 1}\nobjective: {kind: exit_gate_stage2}", "objective.kind", "compares each visit",
    ),
    "weights of no loops": ("objective: {loop_weights: [1, 2]}", "objective.loop_weights", "belong to kind per_loop, not to terminal"),
    "weights of varying loops": (
        "objective: {kind: per_loop, loop_weights: [1, 2]}", "objective.loop_weights", "use depth.prior fixed instead of pln",
    ),
    "weights of other loops": (
        "depth: {prior: fixed, mean: 5, backprop: 3}\nobjective: {kind: per_loop, loop_weights: [1, 2]}", "objective.loop_weights", "are 2 for 3 supervised visits; give 3",
    ),
    "weights of nothing": (
        "depth: {prior: fixed, mean: 2}\nobjective: {kind: per_loop, loop_weights: [0, 0]}", "objective.loop_weights", "are all 0",
    ),
    "muon on divided matrices": ("optimizer: {name: muon}", "parallel.zero", "1 divides matrices that muon needs whole; use parallel.zero=0, or optimizer.name adamw"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_keys_that_contradict_each_other_give_one_clear_sentence(case, tmp_path):
    text, key, sentence, *overrides = WRONG[case]
    (tmp_path / "run.yaml").write_text(f"batch: {{global_batch: 16}}\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        load(Config, tmp_path / "run.yaml", *overrides)
    found = {p.key: p.sentence for p in raised.value.problems}
    assert list(found) == [key], found
    assert sentence in found[key]


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"inject": "none", "state_init": "embedding", "exit_gate": "normed"}, "depth": {"prior": "fixed", "mean": 1, "backprop": None}, "objective": {"kind": "exit_gate"}},
        {"model": {"exit_gate": "normed", "readout": "final_only"}, "objective": {"kind": "exit_gate"}},
        {"model": {"exit_gate": "raw"}, "depth": {"prior": "fixed", "mean": 2}, "objective": {"kind": "exit_gate_stage2"}},
        {"model": {"state_init": "zero", "inject": "add", "qk_bias": True}},
        {"model": {"readout": "final_only", "between": "damping", "coda_linear": True}},
        {"model": {"inject": "huginn_linear", "inject_bias": True}},
        {"model": {"init_scheme": "scaled", "init_depth": 132}},
        {"depth": {"prior": "uniform", "mean": 4.5, "cap": 8}},
        {"depth": {"prior": "table", "table": [0, 1, 3]}},
        {"depth": {"prior": "lognormal_poisson", "mean": 32, "curriculum": 1, "per_sequence": True}},
        {"depth": {"prior": "fixed", "mean": 5, "backprop": 3}, "objective": {"kind": "per_loop", "loop_weights": [0, 1, 2]}},
        {"objective": {"norm_penalty": 0.01, "anchor": 0.1}},
        {"optimizer": {"name": "muon"}, "parallel": {"zero": 0}},
    ],
)  # fmt: skip
def test_what_may_be_combined(content):
    config = from_values(Config, {"batch": {"global_batch": 16}, **content}).config
    assert config.batch.global_batch == 16
