"""The command as people meet it: help without torch, mistakes in one sentence, a model used after its training."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loopscale.cli import main
from tests.conftest import Runs

HEAVY = ("torch", "megatron", "deepspeed", "streaming", "transformers", "numpy", "wandb", "matplotlib", "plotly")


@pytest.mark.parametrize(
    "command", [["--help"], ["train", "--help"], ["corpus", "build", "--help"], ["plan", "--help"], ["eval", "--help"]]
)
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys\nfrom loopscale.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print('LOADED', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
    assert "usage: loopscale" in done.stdout


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["train"], "loopscale train needs a CONFIG file; --help lists what it may hold"),
        (["plan"], "loopscale plan needs a CONFIG file; --help lists what it may hold"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["eval", "nowhere"], "nowhere is neither a run folder nor a checkpoint"),
        (["eval", "nowhere", "--exits"], "nowhere is neither a run folder nor a checkpoint"),
        (["eval", "nowhere", "--exits", "--depths", "1-3"], "--depths does not go with --exits, which measures depths 1 to"),
        (["eval", "nowhere", "--exits", "--diagnose"], "--diagnose does not go with --exits"),
        (["generate", "nowhere", "Hello"], "nowhere is neither a run folder nor a checkpoint"),
        (["report", "nowhere"], "nowhere"),
        (["report"], "loopscale report takes either a RUN folder or --study FILE"),
        (["report", "runs/demo", "--study", "prior.yaml"], "loopscale report takes either a RUN folder or --study FILE"),
        (
            ["report", "runs/demo", "train.steps=3"],
            "loopscale report takes one RUN folder; train.steps=3 belongs to --study FILE",
        ),
        (["report", "--study", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["corpus", "inspect", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(command, sentence, capsys):
    assert main(command) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said


def test_a_command_without_sub_command_shows_help(capsys):
    assert main([]) == 2
    assert main(["corpus"]) == 2
    assert "inspect" in capsys.readouterr().out


def test_a_corpus_that_is_missing_is_named_with_its_remedy(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(f"batch: {{global_batch: 4}}\ncorpus: {{path: {tmp_path / 'none'}}}\nrun: {{folder: {tmp_path}}}\n")
    assert main(["train", str(config)]) == 2
    assert "loopscale corpus build" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_corpus) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("trained"), text_corpus)
    runs.train("model", "train.steps=30", "checkpoint.every=0")
    return runs


@pytest.mark.ranks
def test_evaluation_is_the_validation_loss_and_knows_its_baselines(mesh, trained, threads_as_before, capsys):
    assert main(["eval", str(trained.path("model")), "--sequences", "4", "--depths", "1-6", "--batch", "3"]) == 0
    assert "perplexity" in capsys.readouterr().out
    found = json.loads(next((trained.path("model") / "evaluations").glob("*.json")).read_text())
    validation = trained.records("model")[-1]["validation"]
    by_depth = dict(zip(found["depths"], found["loss"], strict=True))
    assert {int(d): pytest.approx(v, rel=1e-5) for d, v in validation.items()} == {int(d): by_depth[int(d)] for d in validation}
    assert found["perplexity"] == pytest.approx([math.exp(x) for x in found["loss"]])
    assert set(found["baselines"]) == {"unigram", "bigram"}
    assert found["first_depth_divergence"] > 0
    assert all(word in found["protocol"] for word in ("own keys and values", "within documents"))


@pytest.mark.ranks
def test_any_text_file_can_be_evaluated(mesh, trained, threads_as_before):
    shared = Path(__file__).parents[2] / "shared" / "data" / "wikitext" / "wikitext-2-raw.test.txt.gz"
    if not shared.exists():
        pytest.skip("WikiText-2 is not beside this checkout (../shared/data)")
    assert main(["eval", str(trained.path("model")), "--text", str(shared), "--sequences", "8", "--depths", "3"]) == 0
    place = trained.path("model") / "evaluations" / "step-30-text-wikitext-2-raw.test.txt.gz.json"
    found = json.loads(place.read_text())
    assert found["source"] == shared.name
    assert 0 < found["bits_per_byte"][0] < 8 * 4


@pytest.mark.ranks
def test_early_exit_is_measured_beside_fixed_depths(mesh, trained, threads_as_before, capsys):
    assert main(["eval", str(trained.path("model")), "--sequences", "8", "--depths", "1-3", "--batch", "3"]) == 0
    capsys.readouterr()
    assert main(["eval", str(trained.path("model")), "--exits", "--sequences", "8", "--batch", "3"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("depth 3", "margin", "kl", "tok/s")) and "unigram" not in said
    evaluations = trained.path("model") / "evaluations"
    found = json.loads((evaluations / "step-30-exits.json").read_text())
    assert (found["calibration"]["sequences"], found["measured"]["sequences"]) == (4, 4)
    held_out = json.loads((evaluations / "step-30-held-out.json").read_text())
    assert found["calibration"]["tokens"] + found["measured"]["tokens"] == held_out["tokens"]
    assert main(["eval", str(trained.path("model")), "--exits", "--sequences", "1"]) == 2
    assert "two sequences at least" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_loaded_model_gives_the_states_and_text_of_its_checkpoint(mesh, trained):
    import torch

    import loopscale
    from loopscale.errors import UsageError

    model = loopscale.load(trained.path("model") / "checkpoints" / "step-30")
    tokens = torch.tensor([[5, 9, 2, 7], [1, 1, 3, 8]])
    out = model(tokens, depth=4, states=True)
    assert out.logits.shape == (2, 4, model.config.model.vocab_size)
    assert [tuple(s.shape) for s in out.states] == [(2, 4, 32)] * 4
    assert torch.equal(model(tokens, depth=4).logits, out.logits)
    torch.testing.assert_close(model(tokens[:, :2], depth=4).logits, out.logits[:, :2])  # causal
    assert not torch.allclose(model(tokens, depth=1).logits, out.logits)
    greedy = [model.generate("Text 1.", max_new_tokens=8, temperature=0) for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert greedy[0].startswith("Text 1.")
    assert model.generate("Text 1.", max_new_tokens=60, seed=3).startswith("Text")  # longer than the context
    for mistake in (lambda: model(tokens, depth=0), lambda: model(tokens.repeat(1, 30)), lambda: model.generate("")):
        with pytest.raises(UsageError):
            mistake()


@pytest.mark.ranks
def test_the_report_of_a_real_run_is_one_page(mesh, trained):
    assert main(["report", str(trained.path("model"))]) == 0
    page = (trained.path("model") / "report.html").read_text()
    assert page.count('class="figure"') >= 4 or page.count("<figure") >= 4


def test_a_dry_run_starts_nothing_and_does_the_arithmetic(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("batch: {global_batch: 64}\nmodel: {vocab_size: 1000}\ndepth: {groups: 2}\ncorpus: {path: nowhere}\n")
    assert main(["train", str(config), "--dry-run", "--nodes", "2", "--per-node", "4"]) == 0
    said = capsys.readouterr().out
    assert "64 sequences × 128 = 8,192 tokens a step · 2 depth groups of 32, 4 per replica · microbatch 4, 2 a step" in said
    assert "nothing was started" in said
    assert main(["train", str(config), "--dry-run", "--per-node", "3"]) == 2
    assert "cannot be cut into 2 microbatches on each of 3 data-parallel ranks" in capsys.readouterr().err
    assert main(["train", str(config), "--dry-run", "model.vocab_size=null"]) == 2
    assert "must be given, since the corpus cannot tell it" in capsys.readouterr().err


@pytest.fixture
def ring_config(tmp_path) -> str:
    config = tmp_path / "run.yaml"
    config.write_text(
        "batch: {global_batch: 16}\nmodel: {vocab_size: 1000, core_layers: 4}\ndepth: {groups: 4}\n"
        "corpus: {path: nowhere}\nparallel: {pipeline: 2}\n"
    )
    return str(config)


def test_a_plan_is_shown_and_drawn_before_anything_is_started(ring_config, tmp_path, capsys):
    assert main(["plan", ring_config]) == 0
    said = capsys.readouterr().out
    assert "layout   TP 1 × PP 2 × DP 1 · 2 ranks\n" in said
    assert "4 microbatches of 4 sequences on each replica" in said
    assert said.endswith("ok       nothing was started\n")
    picture = tmp_path / "plan.svg"
    ranks = ["--nodes", "2", "--per-node", "4"]
    assert main(["plan", ring_config, *ranks, "--step", "3", "--draw", str(picture), "depth.mean=2"]) == 0
    said = capsys.readouterr().out
    assert "layout   TP 1 × PP 2 × DP 4 · 8 ranks\n" in said
    assert "\nstep     3 · 4 microbatches of 1 sequence on each replica" in said
    assert f"drawn    {picture}" in said and picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["plan", "--step", "500"], "--step is 500; the run has steps 0 to 499 (train.steps 500)"),
        (["plan", "--draw", "plan.gif"], "--draw plan.gif: the name must end in .png, .svg or .pdf"),
        (["plan", "--draw", "nowhere/plan.png"], "nowhere/plan.png"),
        (["plan", "--nodes", "3", "--per-node", "1"], "divide 3 rank(s); start a multiple of"),
        (["train", "--dry-run", "--nodes", "1", "--per-node", "3"], "divide 3 rank(s); start a multiple of"),
        (["plan", "model.vocab_size=null"], "must be given, since the corpus cannot tell it"),
    ],
)
def test_mistakes_of_a_plan_are_told(command, sentence, ring_config, capsys):
    name, *more = command
    assert main([name, ring_config, *more]) != 0
    assert sentence in capsys.readouterr().err


@pytest.mark.ranks
def test_a_plan_has_the_depths_that_training_draws(trained, capsys):
    overrides = [f"corpus.path={trained.corpus}", "train.steps=30"]
    for record in (trained.records("model")[0], trained.records("model")[17]):
        assert main(["plan", str(trained.folder / "tiny.yaml"), *overrides, "--step", f"{record['step'] - 1}"]) == 0
        shown = re.search(r"· depth (.*) · mean", capsys.readouterr().out)[1]
        found = [int(r) for r, n in re.findall(r"(\d+)(?: \(×(\d+)\))?", shown) for _ in range(int(n or 1))]
        assert found == sorted(record["depths"])
