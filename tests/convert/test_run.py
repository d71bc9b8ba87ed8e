"""Folders of other formats: written and read whole, in pieces, after a kill, and refused in a sentence."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import loopscale
from loopscale.checkpoint import parts
from loopscale.cli import main
from loopscale.convert import compare
from loopscale.convert.compare import compared
from loopscale.convert.formats import FORMATS
from loopscale.convert.run import export, import_
from loopscale.convert.tensors import Shards
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError, UsageError
from loopscale.model.stage import LoopedStage
from tests.convert import references
from tests.convert.folders import checkpoint, exported, same, toy, weights_in
from tests.convert.toys import LENGTH, MODELS, VOCABULARY, config, weights

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCABULARY
SENTENCE = (
    r"read back: logits of 32 random tokens at depth 1 and 2, computed in fp32 from (float32|bfloat16) by our code, "
    r"differ by \S+ at most"
)


def taken(folder: Path, **how) -> dict[str, torch.Tensor]:
    """The weights of ours that ``folder`` becomes."""
    out = folder.parent / "back"
    import_(folder, None, out, Silent(), **how)
    return weights_in(out)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of theirs."""
    source = Shards(folder)
    return {name: source.read(name) for name in source.names}


def rewrite(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Other tensors in the same folder, in one shard."""
    for shard in [*folder.glob("model*"), *folder.glob("*.bin")]:
        shard.unlink()
    save_file(state, folder / "model.safetensors")


def change(folder: Path, **values) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, **values}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [2**30, 30_000])
def test_a_checkpoint_comes_back_to_the_bit(mesh, tmp_path, name, shard_bytes):
    there = exported(tmp_path, name, shard_bytes)
    if name == "parcae":
        assert (there / "pytorch_model.bin").is_file() and not list(there.glob("model*"))  # all that the release loads
    else:
        assert (len(list(there.glob("*.safetensors"))) > 1) == (shard_bytes < 2**30)
        assert (there / "model.safetensors.index.json").is_file() == (shard_bytes < 2**30 or name == "xllm")
    assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))
    ours, back = loopscale.load(tmp_path / "ours" / "step-3"), loopscale.load(tmp_path / "back")
    for depth in (1, 4):
        assert torch.equal(ours(TOKENS, depth=depth).logits, back(TOKENS, depth=depth).logits)
    assert back.tokenizer.encode("a b e").ids == [1, 2, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "ours", "theirs"]


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_told_and_read(mesh, tmp_path, name):
    check = export(toy(tmp_path, name), name, tmp_path / "theirs", Silent(), dtype=torch.bfloat16)
    assert "from bfloat16" in str(check) and 0 < check.difference < 0.05 * check.largest
    ours = weights_in(tmp_path / "ours" / "step-3")
    for weight, back in taken(tmp_path / "theirs").items():
        torch.testing.assert_close(back, ours[weight], rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_padding_are_theirs_alone_and_the_loss_is_the_same(mesh, tmp_path, name):
    there = exported(tmp_path, name)
    state, about = state_of(there), json.loads((there / "config.json").read_text())
    theirs = {"hf": "embedding.tokens.weight", "xllm": "embed.weight"} | dict.fromkeys(
        ("ouro", "llama"), "model.embed_tokens.weight"
    )
    embedding = theirs.get(name, "transformer.wte.weight")
    assert len(state[embedding]) == (128 if name == "parcae" else VOCABULARY)
    assert not state[embedding][VOCABULARY:].any()
    taken(there)
    models = [loopscale.load(place) for place in (tmp_path / "ours" / "step-3", tmp_path / "back")]
    losses = [F.cross_entropy(model(TOKENS).logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten()).item() for model in models]
    if name == "ouro":
        logits = references.ouro({n: t.double() for n, t in state.items()}, about, TOKENS, 3)[0][-1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten()).item())
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "index"])
def test_pickles_are_read_as_tensors(mesh, tmp_path, file):
    there = exported(tmp_path, "parcae")
    state = {**state_of(there), "freqs_cis": torch.zeros(1, 4, 1, 6, 2)}
    (there / "pytorch_model.bin").unlink()
    state["lm_head.weight"] = state["transformer.wte.weight"]  # the same storage, as torch saves what is tied
    if file == "index":
        shards = {"a.bin": dict(list(state.items())[:9]), "b.bin": dict(list(state.items())[9:])}
        for name, own in shards.items():
            torch.save(own, there / name)
        places = {n: name for name, own in shards.items() for n in own}
        (there / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        torch.save(state, there / file)
    assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))


class Trap:
    """Makes a file where a pickle is loaded without care."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_that_would_do_something_is_refused_and_does_nothing(mesh, tmp_path, file):
    there, made = exported(tmp_path, "parcae"), tmp_path / "made"
    state = state_of(there)
    (there / "pytorch_model.bin").unlink()
    torch.save({**state, "trap": Trap(made)}, there / file)
    sentence = rf"{file} cannot be read: it asks for io.open, which is no tensor; nothing in it was executed"
    with pytest.raises(CheckpointError, match=sentence):
        taken(there)
    (there / file).write_bytes(pickle.dumps(Trap(made)))
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read"):
        taken(there)
    assert not made.exists()
    pickle.loads((there / file).read_bytes())
    assert made.exists()  # it would have


def test_a_pickle_with_other_bytes_is_one_sentence(tmp_path):
    file, random = tmp_path / "pytorch_model.bin", Random(0)
    torch.save({f"layers.{i}": torch.full((4, 4), float(i)) for i in range(4)}, file)
    content, refused = file.read_bytes(), 0
    names = content.index(b"data.pkl")
    for _ in range(300):
        changed = bytearray(content)
        changed[random.randrange(names, names + 800)] = random.randrange(256)
        file.write_bytes(changed)
        try:
            source = Shards(tmp_path)
            assert all(source.read(name).dtype for name in source.names)
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(str(file))
    assert refused > 100


def test_tensors_that_are_unknown_missing_or_of_another_shape_are_listed(mesh, tmp_path):
    there = exported(tmp_path, "ouro")
    state = state_of(there)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    state["model.norm.weight"] = torch.zeros(47)
    rewrite(there, state)
    with pytest.raises(CheckpointError) as raised:
        taken(there)
    told = str(raised.value)
    assert "model.layers.7.mlp.up_proj.weight is unknown" in told
    assert "model.layers.1.mlp.up_proj.weight is missing" in told
    assert "model.norm.weight has shape [47], must be [48]" in told
    rewrite(there, {f"x{i}": torch.zeros(1) for i in range(9)} | state)
    with pytest.raises(CheckpointError, match=r"x0 is unknown; .*; and \d+ more"):
        taken(there)
    assert not (tmp_path / "back").exists()


def test_a_tied_head_that_is_stored_twice_must_be_the_embedding(mesh, tmp_path):
    there = exported(tmp_path, "huginn")
    state = state_of(there)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    rewrite(there, state)
    assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))
    state["lm_head.weight"][3, 4] += 1
    rewrite(there, state)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from transformer.wte.weight, with which it is tied"):
        import_(there, None, tmp_path / "again", Silent())


def test_damaged_shards_and_indices_are_named(mesh, tmp_path):
    there = exported(tmp_path, "ouro", 30_000)
    shard, index = there / "model-00002-of-00005.safetensors", there / "model.safetensors.index.json"
    shard = shard if shard.is_file() else sorted(there.glob("model-00002-*"))[0]
    whole, listed = shard.read_bytes(), json.loads(index.read_text())
    for damage in (whole[:-100], whole[:5], b""):
        shard.write_bytes(damage)
        with pytest.raises(CheckpointError, match=rf"{shard.name} cannot be read"):
            taken(there)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"names {shard.name}, which is missing"):
        taken(there)
    shard.write_bytes(whole)
    for wrong, sentence in (
        ({"x": shard.name}, "differ about x"),
        ({"x": "../theirs/config.json"}, "which is no file beside it"),
    ):
        index.write_text(json.dumps({"weight_map": {**listed["weight_map"], **wrong}}))
        with pytest.raises(CheckpointError, match=sentence):
            taken(there)
    for wrong in ("{", "[]", '{"weight_map": 1}'):
        index.write_text(wrong)
        with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
            taken(there)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("huginn", {"n_embd": 0}, "config.json: n_embd is 0, must be at least 1"),
        ("huginn", {"n_embd": "48"}, "config.json: n_embd is '48', must be int"),
        ("huginn", {"qk_bias": 1}, "config.json: qk_bias is 1, must be bool"),
        ("huginn", {"injection_type": "add"}, "config.json: injection_type is 'add'; only 'linear' can be read"),
        ("huginn", {"rope_base": -1}, "config.json: rope_base is -1, must be a number above 0"),
        ("ouro", {"rms_norm_eps": float("inf")}, "config.json: rms_norm_eps is inf, must be a number above 0"),
        ("ouro", {"rope_theta": 10**400}, r"config.json: rope_theta is 10+, must be a number above 0"),
        ("ouro", {"total_ut_steps": True}, "config.json: total_ut_steps is True, must be int"),
        ("ouro", {"use_sliding_window": True}, "config.json: use_sliding_window is True; only False can be read"),
        ("ouro", {"layer_types": ["sliding_attention"]}, "config.json: layer_types is"),
        ("parcae", {"n_layers_in_coda": -1}, "config.json: n_layers_in_coda is -1, must be at least 0"),
        ("parcae", {"injection_type": "linear"}, "config.json: injection_type is 'linear'; only 'diagonal' can be read"),
        ("parcae", {"padded_vocab_size": 64}, "has shape"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be_are_named(mesh, tmp_path, name, values, sentence):
    there = exported(tmp_path, name)
    change(there, **values)
    with pytest.raises(CheckpointError, match=sentence):
        taken(there)


def test_what_is_no_model_of_a_known_format_is_told(mesh, tmp_path):
    there = exported(tmp_path, "ouro")
    about = (there / "config.json").read_text()
    for content, error, sentence in (
        (
            "{}",
            UsageError,
            "is of none of the formats hf, huginn, ouro, parcae, xllm, llama, gguf, megatron, deepspeed; --from names one",
        ),
        ("[", CheckpointError, "config.json cannot be read"),
        ("[]", CheckpointError, "does not hold keys and values"),
        (None, UsageError, "has no config.json"),
    ):
        (there / "config.json").unlink(missing_ok=True)
        if content is not None:
            (there / "config.json").write_text(content)
        with pytest.raises(error, match=sentence):
            taken(there)
    (there / "config.json").write_text(about)
    with pytest.raises(CheckpointError, match=r"config.json has no n_embd, which cannot be told from the weights"):
        import_(there, "huginn", tmp_path / "back", Silent())
    (there / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer.json does not exist; --tokenizer names a tokenizer.json"):
        taken(there)
    assert same(taken(there, tokenizer=tmp_path / "ours" / "letters.json"), weights_in(tmp_path / "ours" / "step-3"))
    with pytest.raises(UsageError, match="already exists; name a folder that does not"):
        taken(there)
    (there / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no weights: none of "):
        import_(there, None, tmp_path / "again", Silent())


def test_gates_that_miss_the_embeddings_of_values_are_one_sentence(mesh, tmp_path):
    there = exported(tmp_path, "parcae")
    state = state_of(there)
    state["transformer.prelude.0.attn.ve_gate.weight"] = state.pop("transformer.prelude.1.attn.ve_gate.weight")
    rewrite(there, state)
    with pytest.raises(
        CheckpointError, match=r"value embeddings for layers 1, 3, 5 and gates for them in layers 0, 3, 5; only both"
    ):
        taken(there)
    for changes in ({"prelude_layers": 1}, {"prelude_layers": 1, "core_layers": 1}):
        with pytest.raises(UsageError, match="the number of core layers must be even, and that of all others together"):
            FORMATS["parcae"].refuse_unfit(config("parcae", **changes))


def test_an_artifact_lists_its_files_and_is_held_to_them(mesh, tmp_path):
    there = exported(tmp_path, "xllm", 60_000)
    manifest = json.loads((there / "artifact_manifest.json").read_text())
    listed = {f["path"]: f for f in manifest["files"]}
    assert {"config.json", "model.safetensors.index.json", "tokenizer/tokenizer.json"} < listed.keys()
    assert listed.keys() == {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()} - {
        "artifact_manifest.json"
    }
    for path, file in listed.items():
        content = (there / path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size_bytes"], file["sha256"])
    about = json.loads((there / "config.json").read_text())
    assert about.keys() == {"model", "tokenizer"} and about["tokenizer"] == {"type": "huggingface", "path": "tokenizer"}
    shard = next(there.glob("model-00001-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"theirs is damaged: {shard.name} has digest"):
        taken(there)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (lambda t: (t * 100).to(torch.int8), "has the type int8; only float32, bfloat16, float16 and float64 can be read"),
        (lambda t: t.to(torch.float8_e4m3fn), "has the type float8_e4m3fn; only"),
        (lambda t: t.masked_fill(t == t[0, 0], float("nan")), "holds a number that is not finite"),
    ],
)
def test_what_is_no_weight_is_refused_by_its_name(mesh, tmp_path, changed, sentence):
    there, name = exported(tmp_path, "ouro"), "model.layers.1.mlp.up_proj.weight"
    state = state_of(there)
    rewrite(there, {**state, name: changed(state[name])})
    with pytest.raises(CheckpointError, match=f"^{name} {sentence}"):
        taken(there)


def test_tensors_that_are_not_dense_and_pickles_of_old_are_read_or_named(mesh, tmp_path):
    there, name = exported(tmp_path, "ouro"), "model.layers.1.mlp.up_proj.weight"
    state = state_of(there)
    (there / "model.safetensors").unlink()
    torch.save({**state, name: state[name].to_sparse()}, there / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"pytorch_model.bin holds {name} as no dense tensor"):
        taken(there)
    (there / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read: it ends too early"):
        taken(there)
    torch.save(state, there / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))


def test_a_folder_of_another_name_is_left_alone(mesh, tmp_path):
    """Conversion works in a folder beside OUT; one that it did not make is not touched, whatever its name."""
    there = exported(tmp_path, "ouro")
    work = tmp_path / "converting-back"
    there.rename(work)
    held = {path.name: path.read_bytes() for path in work.iterdir()}
    with pytest.raises(UsageError, match="converting-back is in the way, and was not left by a conversion; rename it"):
        import_(work, None, tmp_path / "back", Silent())
    assert {path.name: path.read_bytes() for path in work.iterdir()} == held
    (work / ".plan").write_bytes(b"\xff{")
    with pytest.raises(UsageError, match="converting-back is in the way"):
        import_(work, None, tmp_path / "back", Silent())


@pytest.mark.parametrize("name", ["huginn", "parcae"])
def test_what_went_through_transformers_goes_on_to_its_format(mesh, tmp_path, name):
    export(toy(tmp_path, name), "hf", tmp_path / "hf", Silent())
    import_(tmp_path / "hf", None, tmp_path / "back", Silent())
    export(tmp_path / "back", name, tmp_path / "there", Silent())
    import_(tmp_path / "there", None, tmp_path / "again", Silent())
    assert same(weights_in(tmp_path / "again"), weights_in(tmp_path / "ours" / "step-3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_that_a_format_cannot_tell_is_refused(mesh, tmp_path, dtype):
    with pytest.raises(UsageError, match=r"cannot be of the format xllm: model.state_std is 2.0, must be 0\.1443"):
        export(toy(tmp_path, "xllm", state_std=2.0), "xllm", tmp_path / "there", Silent(), dtype=dtype)


def test_a_full_disk_is_told_as_what_it_is_and_the_call_made_again(mesh, tmp_path, monkeypatch):
    """A made-up disk, which takes 40 kB of the pickle."""
    ours = toy(tmp_path, "parcae")

    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Any]:
        class Full(io.BytesIO):
            def write(self, content: Any) -> int:
                if self.tell() + len(content) > 40_000:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return super().write(content)

        yield Full()

    with monkeypatch.context() as patched:
        patched.setattr("loopscale.convert.formats.parcae.replacing", full)
        with pytest.raises(OSError, match=r"No space left on device.*pytorch_model\.bin"):
            export(ours, "parcae", tmp_path / "there", Silent())
    assert not (tmp_path / "there").exists()
    export(ours, "parcae", tmp_path / "there", Silent())
    assert same(taken(tmp_path / "there"), weights_in(ours))


def test_a_billion_layers_are_one_sentence(mesh, tmp_path):
    there = exported(tmp_path, "ouro")
    change(there, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="says that the model has 1,000,000,000 layers; at most 10,000 can be read"):
        taken(there)


def test_mistakes_at_the_command_line_are_named(mesh, tmp_path, capsys):
    there, out = exported(tmp_path, "ouro"), str(tmp_path / "back")
    for arguments, sentence in (
        ([str(tmp_path / "missing"), out], "missing does not exist"),
        ([str(there / "model.safetensors"), out], "is a file and no GGUF; give the folder that it lies in"),
        ([str(there), out, "--from", "gguf"], "is no file; give the .gguf itself"),
        ([str(there), out, "--dtype", "bf16"], "--dtype and --shard-size are of what --to writes"),
        ([str(there), out, "--tokenizer", str(there)], "is no file; --tokenizer names a tokenizer.json"),
    ):
        assert main(["convert", *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_huginn_linear_of_paper_b(mesh, tmp_path):
    there = exported(tmp_path, "xllm", inject="huginn_linear", inject_bias=True, between="unit")
    assert {"input_injection.adapter.weight", "input_injection.adapter.bias"} < state_of(there).keys()
    assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))
    with pytest.raises(UsageError, match=r"cannot be of the format xllm: model.between is rmsnorm, must be none or unit there"):
        FORMATS["xllm"].refuse_unfit(config("xllm", inject="huginn_linear", between="rmsnorm"))


def test_the_model_of_a_comparison_goes_from_memory_when_it_is_over(mesh, monkeypatch):
    of, made = config("ouro"), []
    own = weights(of)

    class Watched(LoopedStage):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(weakref.ref(self))

    monkeypatch.setattr(compare, "LoopedStage", Watched)
    gc.disable()
    try:
        compare.logits(of, lambda names: {n: own[n] for n in names})
        assert [model() for model in made] == [None]  # and not when a collector comes by
    finally:
        gc.enable()


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_and_a_length_that_a_format_does_not_tell_change_nothing(mesh, tmp_path, name):
    """Of a sequence that is compared, and of the noise that it begins with."""
    of = config(name)
    of = of.model_copy(update={"run": of.run.model_copy(update={"seed": 7})})
    of = of.model_copy(update={"corpus": of.corpus.model_copy(update={"sequence_length": 8})})
    own = weights(of, spread=0.12)
    check = export(checkpoint(tmp_path / "ours", of, own), name, tmp_path / "theirs", Silent())
    assert check.tokens == 8 and check.difference <= 1e-4 * check.largest


def test_what_was_written_wrong_is_an_error():
    expected = torch.ones(2, 4, 7)
    assert compared(expected, expected + 1e-5, torch.float32).difference == pytest.approx(1e-5, rel=0.1)
    for wrong in (expected + 1e-3, expected * float("nan")):
        with pytest.raises(CheckpointError, match="what was written is not what it was made of"):
            compared(expected, wrong, torch.float32)
    assert compared(expected, expected + 1e-3, torch.bfloat16).stored == torch.bfloat16


def test_the_command_says_what_it_checked(mesh, tmp_path, capsys):
    ours = toy(tmp_path, "huginn")
    assert (
        main(["convert", str(ours), str(tmp_path / "theirs"), "--to", "huginn", "--dtype", "bf16", "--shard-size", "0.0001"]) == 0
    )
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == [f"written {tmp_path / n}" for n in ("theirs", "back")]
    for line in lines:
        assert re.search(SENTENCE, line), line
    assert main(["convert", str(ours), str(tmp_path / "other"), "--to", "ouro"]) == 2
    assert "the model cannot be of the format ouro: model.layer_norm is sandwich" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_run_begins_with_weights_of_another_format(runs):
    runs.train("first", "train.steps=4")
    assert main(["convert", str(runs.path("first")), str(runs.folder / "theirs"), "--to", "xllm"]) == 0
    assert main(["convert", str(runs.folder / "theirs"), str(runs.folder / "back")]) == 0
    runs.train("second", "train.steps=1", "optimizer.lr=1e-12", options=["--init", str(runs.folder / "back")])
    ours, back = (
        {n: t for n, t in tensors.items() if n.startswith("weight/")}
        for tensors in (runs.weights("first", 4), runs.weights("second", 1))
    )
    assert ours.keys() == back.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(back[name], weight, rtol=0, atol=1e-6)


KILLED = """
import os, signal, sys
from pathlib import Path
from loopscale.checkpoint import parts
from loopscale.convert.tensors import Shards
from loopscale.corpus.progress import Silent
from loopscale.convert.run import export, import_

class Killing(Silent):
    def update(self, phase, done, total):
        if phase == "converting" and done > 0.6 * total:
            os.kill(os.getpid(), signal.SIGKILL)

parts.FILE_BYTES = int(sys.argv[4])
source, out = Path(sys.argv[2]), Path(sys.argv[3])
if sys.argv[1] == "export":
    export(source, "huginn", out, Killing(), shard_bytes=int(sys.argv[4]))
else:
    import_(source, None, out, Killing())
"""


@pytest.mark.ranks
@pytest.mark.parametrize("direction", ["export", "import"])
def test_a_killed_call_is_made_again_and_keeps_what_is_whole(mesh, tmp_path, monkeypatch, direction):
    size = 40_000
    ours = toy(tmp_path, "huginn")
    source, out = ours, tmp_path / "out"
    if direction == "import":
        source = tmp_path / "theirs"
        export(ours, "huginn", source, Silent())
    command = [sys.executable, "-W", "ignore", "-c", KILLED, direction, str(source), str(out), str(size)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert not out.exists()
    work = tmp_path / "converting-out"
    kept = {p.name: p.stat().st_ino for p in work.rglob("*.safetensors")}
    assert len(kept) >= 2
    monkeypatch.setattr(parts, "FILE_BYTES", size)
    if direction == "export":
        export(source, "huginn", out, Silent(), shard_bytes=size)
    else:
        import_(source, None, out, Silent())
    now = {p.name: p.stat().st_ino for p in out.rglob("*.safetensors")}
    assert kept.items() <= now.items() and len(now) > len(kept)
    assert not list(out.rglob(".*")) and not list(out.rglob("*.partial"))
    if direction == "export":
        import_(out, None, tmp_path / "back", Silent())
    assert same(weights_in(out if direction == "import" else tmp_path / "back"), weights_in(ours))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(("conv", ".out"))) == []


def test_another_conversion_does_not_go_on_from_what_is_left(mesh, tmp_path):
    work = tmp_path / "converting-theirs"
    work.mkdir()
    (work / ".plan").write_text('"of another"')
    (work / "model.safetensors").write_bytes(b"of another")
    assert same(taken(exported(tmp_path, "ouro")), weights_in(tmp_path / "ours" / "step-3"))


MEMORY = """
import json, sys
from pathlib import Path
import torch
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent
from loopscale.diagnostics.memory import PeakMemory
torch.set_num_threads(1)
small, large, out = map(Path, sys.argv[2:])
export(small, sys.argv[1], out / "a", Silent())  # libraries and buffers
import_(out / "a", None, out / "b", Silent())
memory = PeakMemory(torch.device("cpu"))
export(large, sys.argv[1], out / "c", Silent())
peaks = [memory.read()]
memory.begin()
import_(out / "c", None, out / "d", Silent())
print(json.dumps([*peaks, memory.read()]))
"""


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ouro", "megatron"])
def test_memory_is_that_of_a_layer_and_not_of_the_model(mesh, tmp_path, name):
    """A model of 200 MB in 12 layers of 16 MB, in a process of its own."""
    changes = {"hidden_size": 512, "heads": 4, "kv_heads": None, "ffn_size": 2048, "core_layers": 12}
    small, large = toy(tmp_path / "small", "ouro"), toy(tmp_path / "large", "ouro", **changes)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, name, str(small), str(large), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    assert done.returncode == 0, done.stderr
    size = sum(4 * t.numel() for t in weights_in(large).values())
    assert size > 2e8
    for peak in json.loads(done.stdout.splitlines()[-1]):
        assert peak < size / 2, peak / size
