"""Distributed checkpoints of Megatron-core: written, loaded and saved by Megatron on real ranks, read back, and refused in a
sentence."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import loopscale
from loopscale.cli import main
from loopscale.config.tree import ParallelConfig
from loopscale.convert.formats import FORMATS
from loopscale.convert.formats.megatron import Boxes, sharded_state_dict
from loopscale.convert.formats.stage import extra_states, passed_over
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError, ConfigError, UsageError
from tests.convert.folders import same, toy, weights_in
from tests.convert.layouts import (
    built,
    expected,
    filled,
    load_by_megatron,
    megatron_here,
    parameters,
    save_by_megatron,
    through_megatron,
)
from tests.convert.test_run import TOKENS, Trap
from tests.convert.toys import MODELS, VOCABULARY, config, weights

FC1, QKV = "core_block.layers.1.mlp.linear_fc1.weight", "core_block.layers.1.self_attention.linear_qkv.weight"


def exported(folder: Path, name: str, **how) -> Path:
    """A toy of ``name``'s design, as Megatron has it."""
    export(toy(folder, name), "megatron", folder / "theirs", Silent(), **how)
    return folder / "theirs"


def taken(folder: Path, out: str = "back", **how) -> dict[str, torch.Tensor]:
    """The weights of ours that ``folder`` becomes."""
    import_(folder, None, folder.parent / out, Silent(), **how)
    return weights_in(folder.parent / out)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of theirs."""
    boxes = Boxes(folder, set())
    return {name: boxes.read(name) for name in boxes.names if "_extra_state" not in name}


def rewrite(folder: Path, state: dict[str, torch.Tensor], objects: Sequence[str] = ()) -> None:
    """Other tensors in the same folder, and objects, by Megatron."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
    from megatron.core.utils import make_sharded_tensor_for_checkpoint

    for file in folder.glob("*.distcp"):
        file.unlink()
    given = {name: make_sharded_tensor_for_checkpoint(tensor, name) for name, tensor in state.items()}
    with megatron_here():
        dist_checkpointing.save({**given, **{n: make_sharded_object_for_checkpoint(None, n) for n in objects}}, str(folder))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [2**30, 30_000])
def test_every_design_comes_back_to_the_bit(mesh, tmp_path, name, shard_bytes):
    there, ours = exported(tmp_path, name, shard_bytes=shard_bytes), tmp_path / "ours" / "step-3"
    assert (len(list(there.glob("*.distcp"))) > 2) == (shard_bytes < 2**30)
    assert {".metadata", "metadata.json", "common.pt", "config.yaml", "tokenizer.json"} < {p.name for p in there.iterdir()}
    assert same(taken(there), weights_in(ours))
    assert (tmp_path / "back" / "config.yaml").read_text() == (ours / "config.yaml").read_text()
    models = loopscale.load(ours), loopscale.load(tmp_path / "back")
    assert torch.equal(*(model(TOKENS, depth=4).logits for model in models))


@pytest.mark.parametrize("name", MODELS)
def test_megatron_loads_what_was_written_and_what_it_saves_comes_back(mesh, tmp_path, name):
    there, of = exported(tmp_path, name), config(name)
    stage = built(mesh, of)
    load_by_megatron(stage, there)
    found = parameters(stage)
    assert same(found, expected(of, found, 0, 1))
    save_by_megatron(stage, tmp_path / "saved")
    assert Boxes(tmp_path / "saved", set()).names and not Boxes(there, passed_over(of.model))._unknown
    for part in ("config.yaml", "tokenizer.json"):
        shutil.copy(there / part, tmp_path / "saved")
    assert same(taken(tmp_path / "saved"), weights_in(tmp_path / "ours" / "step-3"))


LAYOUTS = {
    "tp2": (2, ParallelConfig(tensor=2), tuple(MODELS)),
    "pp2": (2, ParallelConfig(pipeline=2), tuple(MODELS)),
    "tp4": (4, ParallelConfig(tensor=4), ("huginn", "parcae")),
}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_load_and_save_it_in_any_layout(mesh, ranks, tmp_path, layout):
    size, parallel, names = LAYOUTS[layout]
    (tmp_path / "theirs").mkdir()
    for name in names:
        exported(tmp_path / name, name).rename(tmp_path / "theirs" / name)
    found = ranks.run(through_megatron, size, tmp_path / "theirs", tmp_path / "saved", names, parallel=parallel)
    for i, name in enumerate(names):
        of, held = config(name), set()
        for rank, own in enumerate(found):
            assert same(own[i], expected(of, own[i], rank % parallel.tensor, parallel.tensor)), (name, rank)
            held |= own[i].keys()
        assert held == {rule.theirs for rule in FORMATS["megatron"].rules(of, {})}
        there = shutil.copy(tmp_path / "theirs" / name / "tokenizer.json", tmp_path / "saved" / name)
        given = {"config_file": tmp_path / name / "ours" / "step-3" / "config.yaml", "tokenizer": Path(there)}
        assert same(taken(tmp_path / "saved" / name, f"back-{name}", **given), weights_in(tmp_path / name / "ours" / "step-3"))


def test_names_and_shapes_are_those_that_megatrons_modules_give(mesh):
    from megatron.core.transformer.utils import sharded_state_dict_default

    of = config("ouro")
    stage = filled(mesh, of)
    ours, counted = sharded_state_dict(stage), 0
    modules = {f"core_block.layers.{n}.": layer for n, layer in stage.core_block.layers.items()}
    for prefix, module in {**modules, "embedding.": stage.embedding, "head.": stage.head}.items():
        for name, theirs in sharded_state_dict_default(module, prefix).items():
            own, counted = ours[name], counted + 1
            assert type(own) is type(theirs) and own.key == theirs.key == name
            parts = [x.build() if hasattr(x, "build") else [x] for x in (own, theirs)]
            for a, b in zip(*parts, strict=True):
                assert (a.global_shape, a.global_offset, a.replica_id) == (b.global_shape, b.global_offset, b.replica_id)
    assert counted == len([name for name in ours if name.startswith(("core_block", "embedding", "head"))]) == 3 * 12 + 3


def test_rows_lie_by_group_and_the_gate_above_up(mesh, tmp_path):
    there, of, ours = exported(tmp_path, "ouro"), config("ouro"), weights(config("ouro"), spread=0.12)
    held = Boxes(there, passed_over(of.model))
    q, k, v = (ours[f"core.1.{x}"] for x in "qkv")
    group = [torch.cat((q[24 * g : 24 * (g + 1)], k[12 * g : 12 * (g + 1)], v[12 * g : 12 * (g + 1)])) for g in (0, 1)]
    assert torch.equal(held.read(QKV), torch.cat(group))
    assert torch.equal(held.read(FC1), torch.cat((ours["core.1.gate"], ours["core.1.up"])))
    assert held.shape("embedding.weight") == held.shape("head.weight") == (128, 48)
    assert torch.equal(held.read("head.weight")[:VOCABULARY], ours["head"]) and not held.read("head.weight")[VOCABULARY:].any()


@pytest.mark.parametrize("rows", [VOCABULARY, 192])
def test_padding_of_any_length_is_stripped(mesh, tmp_path, rows):
    """Three ranks pad 101 rows to 192."""
    there, of = exported(tmp_path, "ouro"), config("ouro")
    state = state_of(there)
    for name in ("embedding.weight", "head.weight"):
        state[name] = F.pad(state[name][:VOCABULARY], (0, 0, 0, rows - VOCABULARY), value=7.0)
    rewrite(there, state, extra_states(of.model))
    assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))
    stage = built(mesh, of)
    load_by_megatron(stage, there)
    found = parameters(stage)
    for name, values in expected(of, found, 0, 1).items():
        assert torch.equal(found[name][:VOCABULARY], values[:VOCABULARY])


def test_bf16_is_written_and_read(mesh, tmp_path):
    there, ours = exported(tmp_path, "huginn", dtype=torch.bfloat16), weights(config("huginn"), spread=0.12)
    assert {t.dtype for t in state_of(there).values()} == {torch.bfloat16}
    for name, weight in taken(there).items():
        assert torch.equal(weight, ours[name.removeprefix("weight/")].bfloat16().float())


def test_tensors_and_objects_that_are_unknown_missing_or_of_another_shape_are_listed(mesh, tmp_path):
    there = exported(tmp_path, "ouro")
    state = state_of(there)
    state["core_block.layers.7.mlp.linear_fc2.weight"] = state.pop("core_block.layers.1.mlp.linear_fc2.weight")
    state["readout.norm"] = torch.zeros(47)
    state["embedding.weight"] = torch.zeros(100, 48)
    rewrite(there, state, objects=("rng_state", "core_block.layers.0.mlp.linear_fc1._extra_state"))
    with pytest.raises(CheckpointError) as raised:
        taken(there)
    told = str(raised.value)
    assert "does not hold what its config.yaml says: " in told
    for odd in (
        "core_block.layers.7.mlp.linear_fc2.weight is unknown",
        "core_block.layers.1.mlp.linear_fc2.weight is missing",
        "rng_state/shard_0_1 is unknown",
        "readout.norm has shape [47], must be [48]",
        "embedding.weight has shape [100, 48], must be [128, 48]",
    ):
        assert odd in told
    assert "_extra_state" not in told and not (tmp_path / "back").exists()


def test_files_that_are_cut_or_missing_are_named(mesh, tmp_path):
    there = exported(tmp_path, "ouro", shard_bytes=30_000)
    file = there / "__0_2.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"__0_2\.distcp is shorter than \.metadata says"):
        taken(there)
    file.write_bytes(whole[:300] + bytes(len(whole) - 300))
    with pytest.raises(CheckpointError, match=r"__0_2\.distcp cannot be read at \S+weight: "):
        taken(there)
    file.write_bytes((there / "__0_1.distcp").read_bytes() * 2)
    with pytest.raises(CheckpointError, match=r"__0_2\.distcp (cannot be read at|does not hold) \S+"):
        taken(there)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata names __0_2\.distcp, which is missing"):
        taken(there)


def test_a_byte_that_is_flipped_is_noticed(mesh, tmp_path):
    there = exported(tmp_path, "ouro")
    file = there / "__0_1.distcp"
    metadata, whole = pickle.loads((there / ".metadata").read_bytes()), file.read_bytes()
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == FC1)
    at = place.offset + place.length // 2
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CheckpointError, match=rf"__0_1\.distcp is damaged at {re.escape(FC1)}"):
        taken(there)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("file", ["__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt", "config.yaml"])
def test_a_full_disk_is_told_as_one(mesh, tmp_path, file, monkeypatch, capsys):
    class Full(io.BytesIO):
        def write(self, content) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ours, opened = toy(tmp_path, "ouro"), Path.open
    monkeypatch.setattr(Path, "open", lambda p, *how: Full() if p.name == f"{file}.partial" else opened(p, *how))
    assert main(["convert", str(ours), str(tmp_path / "theirs"), "--to", "megatron"]) == 1
    told = capsys.readouterr().err
    assert re.search(rf"converting-theirs/{re.escape(file)}: No space left on device", told) and "Traceback" not in told
    assert not (tmp_path / "theirs").exists()
    monkeypatch.undo()
    assert main(["convert", str(ours), str(tmp_path / "theirs"), "--to", "megatron"]) == 0
    assert same(taken(tmp_path / "theirs"), weights_in(ours))


@pytest.mark.parametrize("vocabulary", ["  vocab_size: null\n", ""])
def test_a_configuration_without_its_vocabulary_is_told(mesh, tmp_path, vocabulary):
    there = exported(tmp_path, "ouro")
    text = (there / "config.yaml").read_text()
    (there / "config.yaml").write_text(text.replace(f"  vocab_size: {VOCABULARY}\n", vocabulary))
    with pytest.raises(UsageError, match=r"theirs/config\.yaml: model\.vocab_size is null; give the config\.yaml of the run"):
        taken(there)


def test_metadata_that_are_damaged_are_one_sentence(mesh, tmp_path):
    there = exported(tmp_path, "ouro")
    file, whole = there / ".metadata", (there / ".metadata").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for damaged in (b"", b"{", whole[:100], whole[:-1], pickle.dumps(None), pickle.dumps({}), whole.replace(b"__0_1", b"../_1")):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: .+"):
            taken(there)
    of = config("ouro")
    for _ in range(300):  # whatever a byte is, it is read or refused
        at, value = (int(torch.randint(n, (), generator=generator)) for n in (len(whole), 256))
        file.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            boxes = Boxes(there, passed_over(of.model))
        except CheckpointError:
            continue
        assert all(isinstance(name, str) for name in boxes.names)
    file.write_bytes(whole)
    for content, sentence in (
        ("{", "metadata.json cannot be read"),
        ("[]", "metadata.json cannot be read"),
        ('{"sharded_backend": "zarr"}', "sharded_backend is 'zarr'; only 'torch_dist' can be read"),
    ):
        (there / "metadata.json").write_text(content)
        with pytest.raises(CheckpointError, match=sentence):
            taken(there)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda stored, place: place.__dict__.update(relative_path="../theirs/__0_1.distcp"), "is no file beside it"),
        (lambda stored, place: place.__dict__.update(transform_descriptors=["stream.zstd"]), "is compressed"),
        (lambda stored, place: place.__dict__.update(offset=-5), "a box of head.weight cannot be"),
        (lambda stored, place: stored.chunks[0].__dict__.update(sizes=torch.Size([1, 48])), "head.weight are not all of it"),
        (lambda stored, place: stored.chunks[0].__dict__.update(sizes=torch.Size([129, 48])), "head.weight lies outside of it"),
        (lambda stored, place: stored.__dict__.update(chunks=[replace(stored.chunks[0], sizes=torch.Size([64, 48]))] * 2),
         "head.weight are not all of it"),
    ],
    ids=["path", "compressed", "offset", "sizes", "outside", "twice"],
)  # fmt: skip
def test_boxes_that_cannot_be_are_refused(mesh, tmp_path, change, sentence):
    there = exported(tmp_path, "ouro")
    metadata = pickle.loads((there / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "head.weight")
    change(metadata.state_dict_metadata["head.weight"], place)
    (there / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata cannot be read: .*{sentence}"):
        taken(there)


@pytest.mark.parametrize("file", [".metadata", "__0_1.distcp", "common.pt"])
def test_a_pickle_that_would_do_something_does_nothing(mesh, tmp_path, file):
    there, made = exported(tmp_path, "ouro"), tmp_path / "made"
    if file == "__0_1.distcp":  # in the place of the first tensor
        trap = io.BytesIO()
        torch.save(Trap(made), trap)
        whole = (there / file).read_bytes()
        (there / file).write_bytes(trap.getvalue() + whole[len(trap.getvalue()) :])
        metadata = pickle.loads((there / ".metadata").read_bytes())
        first = next(p for p in metadata.storage_data.values() if (p.relative_path, p.offset) == (file, 0))
        first.length = len(trap.getvalue())
        (there / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        (there / file).write_bytes(pickle.dumps(Trap(made)))
    if file == "common.pt":  # no weights are in it
        assert same(taken(there), weights_in(tmp_path / "ours" / "step-3"))
    else:
        with pytest.raises(CheckpointError, match=rf"{re.escape(file)} cannot be read"):
            taken(there)
    assert not made.exists()
    if file != "__0_1.distcp":
        pickle.loads((there / file).read_bytes())
        assert made.exists()  # it would have


def test_the_configuration_and_the_tokenizer_lie_beside_or_are_given(mesh, tmp_path, capsys):
    there, ours = exported(tmp_path, "huginn"), tmp_path / "ours" / "step-3"
    (there / "config.yaml").unlink()
    (there / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"theirs/config\.yaml does not exist; --config names the config\.yaml of the run"):
        taken(there)
    command = ["convert", str(there), str(tmp_path / "back"), "--config", str(ours / "config.yaml")]
    assert main(command) == 2
    assert "tokenizer.json does not exist; --tokenizer names a tokenizer.json" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(ours / "tokenizer.json")]) == 0
    assert "read back: logits of 32 random tokens" in capsys.readouterr().out
    assert same(weights_in(tmp_path / "back"), weights_in(ours))
    assert main(["convert", str(ours), str(tmp_path / "other"), "--to", "megatron", "--config", str(ours / "config.yaml")]) == 2
    with pytest.raises(CheckpointError, match=r"does not hold what its config\.yaml says: .* is missing"):
        (there / "config.yaml").write_text((ours / "config.yaml").read_text().replace("core_layers: 2", "core_layers: 3"))
        taken(there, "again", tokenizer=ours / "tokenizer.json")
    (there / "config.yaml").write_text("model: {width: 3}")
    with pytest.raises(ConfigError, match=r"theirs/config\.yaml: 1 problem"):
        taken(there, "again", tokenizer=ours / "tokenizer.json")
    export(ours, "huginn", tmp_path / "huginn", Silent())
    with pytest.raises(UsageError, match=r"a model of the format huginn brings its own"):
        taken(tmp_path / "huginn", "again", config_file=ours / "config.yaml")


KILLED = """
import os, signal, sys
from pathlib import Path
from loopscale.corpus.progress import Silent
from loopscale.convert.run import export

class Killing(Silent):
    def update(self, phase, done, total):
        if phase == "converting" and done > 0.6 * total:
            os.kill(os.getpid(), signal.SIGKILL)

export(Path(sys.argv[1]), "megatron", Path(sys.argv[2]), Killing(), shard_bytes=40_000)
"""


@pytest.mark.ranks
def test_a_killed_call_is_made_again_and_keeps_what_is_whole(mesh, tmp_path):
    ours, out = toy(tmp_path, "huginn"), tmp_path / "out"
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(ours), str(out)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    kept = {p.name: p.stat().st_ino for p in (tmp_path / "converting-out").glob("__0_[1-9]*.distcp")}
    assert len(kept) >= 2
    export(ours, "megatron", out, Silent(), shard_bytes=40_000)
    now = {p.name: p.stat().st_ino for p in out.glob("__0_[1-9]*.distcp")}
    assert kept.items() <= now.items() and len(now) > len(kept)
    assert same(taken(out), weights_in(ours))
    stage, of = built(mesh, config("huginn")), config("huginn")
    load_by_megatron(stage, out)
    assert same(parameters(stage), expected(of, parameters(stage), 0, 1))
