# ruff: noqa: E501  (the table of mistakes reads better one a line)
"""Reading configurations: layers, origins, and every problem in one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopscale.cli import main
from loopscale.config import ClusterConfig, Config, CorpusBuild, from_values, load
from loopscale.config.study import load_study
from loopscale.errors import ConfigError, UsageError

GOOD = "batch: {global_batch: 16}\n"
WRONG = {
    "unknown key": ("model: {hidden_sise: 256}", "model.hidden_sise", "unknown key; did you mean model.hidden_size?"),
    "unknown section": ("modle: {heads: 4}", "modle", "unknown key; did you mean model?"),
    "key without section": ("heads: 4", "heads", "unknown key; did you mean model.heads?"),
    "text for a number": ("model: {heads: four}", "model.heads", "is 'four', must be a whole number, at least 1"),
    "number for a switch": ("corpus: {verify: 1}", "corpus.verify", "is 1, must be true or false"),
    "fraction for a count": ("train: {steps: 1.5}", "train.steps", "is 1.5, must be a whole number, at least 1"),
    "below its bound": ("optimizer: {lr: 0}", "optimizer.lr", "is 0, must be a number, above 0"),
    "above its bound": ("optimizer: {warmup: 1.5}", "optimizer.warmup", "is 1.5, must be a number, at least 0, at most 1"),
    "misspelt choice": ("model: {inject: orto}", "model.inject", "is 'orto', must be one of none, add, huginn_linear, diagonal, parcae, ortho; did you mean ortho?"),
    "unoffered stage": ("parallel: {zero: 3}", "parallel.zero", "3 would gather the shared weights again at every visit; use 0 or 1"),
    "a section that is a number": ("model: 5", "model", "is 5, must be a section of keys"),
    "a list that is too long": ("optimizer: {betas: [0.9, 0.95, 0.99]}", "optimizer.betas", "must be a list of 2"),
    "heads do not divide": ("model: {heads: 5}", "model.heads", "5 does not divide model.hidden_size 128; give model.head_dim"),
    "kv heads do not divide": ("model: {kv_heads: 3}", "model.kv_heads", "3 does not divide model.heads 4"),
    "a state that sees no tokens": (
        "model: {inject: none}\ndepth: {backprop: null}", "model.state_init", "would never see the tokens; use state_init embedding",
    ),
    "embeddings without gradient": (
        "model: {inject: none, state_init: embedding}\ndepth: {backprop: 2}", "depth.backprop", "gives the embeddings no gradient",
    ),
    "a fixed depth that is a fraction": ("depth: {prior: fixed, mean: 4.5}", "depth.mean", "is 4.5; a fixed depth is a whole number"),
    "groups do not divide": ("depth: {groups: 5}", "depth.groups", "5 groups do not divide the global batch of 16 sequences"),
    "three batch sizes that disagree": (
        "batch: {microbatch: 3, accumulation: 4}", "batch.global_batch", "is 16, but microbatch 3 × accumulation 4 × 1 data-parallel ranks = 12",
    ),
    "a microbatch across groups": (
        "batch: {microbatch: 8}\ndepth: {groups: 4}", "batch.microbatch", "1 data-parallel ranks × microbatch 8 must divide the depth group of 4",
    ),
    "more stages than there are": ("parallel: {pipeline: 4}", "parallel.pipeline", "4 stages need at least 3 core layers beside the home stage; model.core_layers is 2. Use 1 to 3"),
    "slices that do not fit": ("parallel: {pipeline: 3, slices: [1, 0, 1]}", "parallel.slices", "[1, 0, 1] must be one number for each of the 3 stage(s), 2 in all"),
    "heads that do not divide": ("parallel: {tensor: 3}", "parallel.tensor", "3 does not divide model.heads 4"),
    "positions that do not divide": ("parallel: {tensor: 2, sequence_parallel: true}\ncorpus: {sequence_length: 31}", "parallel.sequence_parallel", "parallel.tensor 2 does not divide corpus.sequence_length 31; use sequence_parallel=false"),
    "context parallelism": ("parallel: {context: 2}", "parallel.context", "context parallelism is not offered"),
    "a reducing ZeRO": ("parallel: {zero: 2}", "parallel.zero", "2 divides gradients, and those of a shared block are whole"),
    "an offloaded optimizer without ZeRO": ("parallel: {zero: 0, offload_optimizer: true}", "parallel.offload_optimizer", "needs parallel.zero=1"),
    "nothing to offload": ("train: {recompute: visit, offload_activations: true}", "train.offload_activations", "has nothing to take away while train.recompute visit"),
    "unknown recomputation": ("train: {recompute: block}", "train.recompute", "none, visit, layer"),
    "a remote corpus without cache": ("corpus: {path: 's3://bucket/corpus'}", "corpus.cache", "must name a local folder"),
    "a warning after the end": ("train: {stuck_after: 600}", "train.stuck_after", "is 600, but after parallel.timeout 600 seconds without an answer"),
    "a schedule longer than the run": ("optimizer: {warmup: 0.6, decay_share: 0.6}", "optimizer.decay_share", "together exceed the whole run"),
    "nothing to go back to": ("train: {spikes: rewind}\ncheckpoint: {every: 0}", "train.spikes", "rewind goes back to a checkpoint, and checkpoint.every 0 makes none; use skip"),
    "a mean beyond the cap": ("depth: {mean: 80}", "depth.mean", "is 80, above depth.cap 64"),
}  # fmt: skip


def written(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_gives_one_clear_sentence_and_exit_code_2(case, tmp_path, capsys):
    text, key, sentence = WRONG[case]
    base = written(tmp_path, GOOD, "base.yaml")
    path = written(tmp_path, f"base: {base.name}\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        load(Config, path)
    found = {p.key: p.sentence for p in raised.value.problems}
    assert list(found) == [key], found
    assert sentence in found[key]
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: 1 problem\n")
    assert "Traceback" not in said


def test_all_problems_are_told_at_once(tmp_path):
    path = written(tmp_path, "model: {hidden_sise: 1, heads: five}\ndepth: {prior: fixed, mean: 2.5}\n")
    with pytest.raises(ConfigError) as raised:
        load(Config, path, ["parallel.pipeline=4", "batch.global_batch=10", "depth.groups=3", "nothing"])
    keys = {p.key for p in raised.value.problems}
    assert keys == {"model.hidden_sise", "model.heads", "depth.mean", "parallel.pipeline", "depth.groups", "nothing"}
    assert str(raised.value).startswith(f"{path} + 4 overrides: 6 problems")


def test_layers_go_over_each_other_and_keep_their_origins(tmp_path):
    base = written(tmp_path, "batch: {global_batch: 4}\nmodel: {heads: 8, hidden_size: 64}\n", "base.yaml")
    path = written(tmp_path, "base: base.yaml\nmodel: {heads: 2}\n")
    loaded = load(Config, path, ["optimizer.lr=3e-4"])
    assert (loaded.config.model.heads, loaded.config.model.hidden_size, loaded.config.optimizer.lr) == (2, 64, 3e-4)
    assert loaded.origins["model.heads"] == str(path)
    assert loaded.origins["model.hidden_size"] == str(base)
    assert loaded.origins["optimizer.lr"] == "override"
    assert "model.ffn_size" not in loaded.origins


def test_a_null_override_unsets(tmp_path):
    path = written(tmp_path, GOOD + "depth: {backprop: 3}\n")
    assert load(Config, path, ["depth.backprop=null"]).config.depth.backprop is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: {heads: [", "is not valid YAML (line 1"),
        ("a: 1\na: 2\n", "the key 'a' appears twice"),
        ("- 1\n", "must hold keys and values, not list"),
        ("base: missing.yaml\n", "missing.yaml does not exist, named as base by"),
        ("base: run.yaml\n", "name each other as base"),
        ("? [a, b]\n: 3\n", "a key must be a word"),
        ("1: 2\n", "the key 1 is not a word"),
        ("train: &a {b: *a}\n", "is an alias its own part?"),
        ("a: " + "[" * 3000, "is not valid YAML"),
        ("a: " + "9" * 5000, "is not valid YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, sentence):
    with pytest.raises(UsageError, match="") as raised:
        load(Config, written(tmp_path, text))
    assert sentence in str(raised.value)
    assert raised.value.exit_code == 2


def test_files_that_cannot_be_read_as_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        load(Config, path)
    with pytest.raises(UsageError, match="is a folder"):
        load(Config, tmp_path)


@pytest.mark.parametrize("text", ["5400", "1:30:00", "5.4e3"])
def test_a_limit_of_time_is_seconds_or_as_yaml_writes_times(tmp_path, text):
    path = written(tmp_path, GOOD + f"train: {{max_time: {text}}}\n")
    assert load(Config, path).config.train.max_time == 5400
    assert load(Config, path, [f"train.max_time={text}"]).config.train.max_time == 5400


def test_merge_keys_and_an_empty_base_are_yaml_as_usual(tmp_path):
    config = load(Config, written(tmp_path, "base: null\nmodel: {<<: {heads: 2}, ffn_size: 3}\n" + GOOD)).config
    assert (config.model.heads, config.model.ffn_size) == (2, 3)


def test_problems_inside_lists_name_the_entry(tmp_path):
    text = "output: x\nsources: [{kind: filez, path: 3, wieght: 2}, {path: x}]\n"
    with pytest.raises(ConfigError) as raised:
        load(CorpusBuild, written(tmp_path, text))
    found = {p.key: p.sentence for p in raised.value.problems}
    assert found["sources[1].kind"].endswith("did you mean files?")
    assert found["sources[1].path"] == "is 3, must be text or null"
    assert found["sources[1].wieght"] == "unknown key; did you mean sources.weight?"
    assert found["sources[2].kind"] == "must be given"
    assert len(found) == 4


def test_long_values_are_printed_whole(tmp_path, capsys):
    path = written(tmp_path, GOOD)
    depths, project = list(range(1, 61)), "p " * 100
    assert main(["train", str(path), "--print-config", f"validation.depths={depths}", f"log.wandb_project={project}x"]) == 0
    printed = written(tmp_path, capsys.readouterr().out, "printed.yaml")
    config = load(Config, printed).config
    assert config.validation.depths == tuple(depths)
    assert config.log.wandb_project == f"{project}x"


def test_a_missing_file_names_its_neighbour(tmp_path):
    written(tmp_path, GOOD, "demo.yaml")
    with pytest.raises(UsageError, match=r"did you mean .*demo\.yaml\?"):
        load(Config, tmp_path / "demmo.yaml")


def test_print_config_shows_every_value_with_its_origin(tmp_path, capsys):
    path = written(tmp_path, GOOD)
    assert main(["train", str(path), "--print-config", "optimizer.lr=3e-4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["lr:", "0.0003", "#", "override"] for line in lines)
    assert any(line.split() == ["global_batch:", "16", "#", str(path)] for line in lines)
    assert any(line.split() == ["heads:", "4", "#", "default"] for line in lines)


def test_the_resolved_config_loads_again(tmp_path):
    from loopscale.train.folder import config_text

    config = from_values(Config, {"batch": {"global_batch": 8}, "validation": {"depths": [1, 2]}}).config
    assert load(Config, written(tmp_path, config_text(config))).config == config


@pytest.mark.parametrize(("tree", "command"), [(Config, ["train"]), (CorpusBuild, ["corpus", "build"])])
def test_the_schema_and_the_help_know_every_key(tree, command, capsys):
    from loopscale.config.load import all_keys

    assert main([*command, "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {"base", *tree.model_fields}
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    help_text = capsys.readouterr().out
    plain = help_text.replace("[].", ".")
    assert all(".".join(key) in plain for key in all_keys(tree))
    assert "must be given" in help_text or "default" in help_text


def test_every_shipped_config_loads():
    root = Path(__file__).parents[2] / "configs"
    trees = {"cluster": ClusterConfig, "corpus": CorpusBuild, "presets": Config, "run": Config}
    files = sorted(root.rglob("*.yaml"))
    assert {path.relative_to(root).parts[0] for path in files} == {*trees, "studies"}
    for path in files:
        room = path.relative_to(root).parts[0]
        load_study(path) if room == "studies" else load(trees[room], path)
