"""Checkpoints of DeepSpeed: saved by it on real ranks, read, and refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loopscale
from loopscale.cli import main
from loopscale.config.tree import ParallelConfig
from loopscale.convert.mapping import Ours
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent
from loopscale.errors import CheckpointError, UsageError
from loopscale.model.weights import holders
from loopscale.train.folder import config_text
from tests.checkpoint.golden.make import tokenizer
from tests.convert.folders import same, weights_in
from tests.convert.layouts import save_by_deepspeed
from tests.convert.test_run import TOKENS, Trap
from tests.convert.toys import LENGTH, MODELS, config

STATES = "global_step1/mp_rank_00_model_states.pt"


def placed(folder: Path, name: str) -> Path:
    """A checkpoint of DeepSpeed's with what it does not write."""
    (folder / "config.yaml").write_text(config_text(config(name)))
    tokenizer(str(folder / "tokenizer.json"))
    return folder


def saved(mesh, folder: Path, name: str, zero_stage: int = 1) -> tuple[Path, dict[str, torch.Tensor]]:
    (found,) = save_by_deepspeed(mesh, folder, zero_stage, [name])
    return placed(folder / name, name), found


def taken(folder: Path, out: Path, **how) -> dict[str, torch.Tensor]:
    """The weights of ours that ``folder`` becomes."""
    import_(folder, None, out, Silent(), **how)
    return weights_in(out)


def joined(of, found: list[dict[str, torch.Tensor]], size: int) -> dict[str, torch.Tensor]:
    """Weights of ours of the parameters of all ranks, ``size`` of which share each."""
    weights = {f"weight/{n}": torch.full(w.shape, torch.nan) for n, w in Ours.of(of.model, LENGTH).weights.items()}
    for holder in holders(of.model, LENGTH):
        for rank, own in enumerate(found):
            for box, here in holder.views(own[holder.parameter], rank % size, size) if holder.parameter in own else ():
                spans = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                weights[f"weight/{box.weight.name}"][spans] = here
    return weights


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_every_design_is_read_to_the_bit(mesh, tmp_path, name, zero_stage):
    there, found = saved(mesh, tmp_path, name, zero_stage)
    expected = joined(config(name), [found], 1)
    assert same(taken(there, tmp_path / "back"), expected)
    assert not any(torch.isnan(t).any() for t in expected.values())
    assert same(taken(there, tmp_path / "again"), expected)
    assert loopscale.load(tmp_path / "back")(TOKENS).logits.isfinite().all()


LAYOUTS = {
    "tp2": (2, ParallelConfig(tensor=2), 1, tuple(MODELS)),
    "pp2": (2, ParallelConfig(pipeline=2), 0, tuple(MODELS)),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2), 1, ("huginn", "parcae")),
    "dp2": (2, ParallelConfig(), 1, ("ouro",)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_of_ranks_are_joined(mesh, ranks, tmp_path, layout):
    size, parallel, zero_stage, names = LAYOUTS[layout]
    found = ranks.run(save_by_deepspeed, size, tmp_path, zero_stage, names, parallel=parallel)
    for i, name in enumerate(names):
        expected = joined(config(name), [own[i] for own in found], parallel.tensor)
        assert not any(torch.isnan(t).any() for t in expected.values())
        assert same(taken(placed(tmp_path / name, name), tmp_path / f"back-{name}"), expected)


def change(file: Path, how) -> None:
    held = torch.load(file, weights_only=True)
    how(held)
    torch.save(held, file)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (lambda held: held["module"].pop("readout.norm"), "readout.norm is missing"),
        (lambda held: held["module"].update({"rotary.turns": torch.zeros(3)}), "rotary.turns is unknown"),
        (lambda held: held["module"].update({"readout.norm": torch.zeros(47)}), r"readout.norm has shape \[47\], must be \[48\]"),
        (lambda held: held["module"].update({"head.weight": torch.zeros(64, 48)}), r"head.weight has shape \[64, 48\], must be"),
        (lambda held: held["module"].update({"readout.norm": None}), "holds readout.norm as no tensor"),
        (lambda held: held["module"].update({k: t.bfloat16() for k, t in held["module"].items() if t is not None}),
         r"holds \S+ in bfloat16: the optimizer has it in fp32, which is not read; save an engine whose model is fp32"),
        (lambda held: held.update(module={str(i): t for i, t in enumerate(held["module"].values())}),
         "its parameters have numbers for names: the engine was given a list of them and not a stage"),
        (lambda held: held.pop("module"), "does not hold a module's tensors by name"),
        (lambda held: held.update(mp_world_size=2), r"mp_rank_00_model_states.pt is one of 2 ranks', \S+ has 1"),
    ],
    ids=["missing", "unknown", "shape", "rows", "no tensor", "bf16", "numbered", "no module", "ranks"],
)  # fmt: skip
def test_what_is_no_stage_of_ours_is_told(mesh, tmp_path, how, sentence):
    there, _ = saved(mesh, tmp_path, "ouro")
    change(there / STATES, how)
    with pytest.raises(CheckpointError, match=sentence):
        taken(there, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_shares_of_several_shapes_are_told(mesh, tmp_path):
    there, found = saved(mesh, tmp_path, "ouro")
    for rank in (0, 1):
        states = {n: t.chunk(2)[rank] if n == "head.weight" else t for n, t in found.items()}
        states["head.weight"] = states["head.weight"][: 64 - rank]
        torch.save({"module": states, "mp_world_size": 2}, there / f"global_step1/mp_rank_0{rank}_model_states.pt")
    with pytest.raises(CheckpointError, match=r"ranks have head.weight in shapes \[64, 48\], \[63, 48\]"):
        taken(there, tmp_path / "back")


def split(there: Path, found: dict[str, torch.Tensor], how=lambda ranks: None) -> Path:
    """The checkpoint of one rank as one of two, whose parameters ``how`` changes."""
    ranks: list[dict[str, torch.Tensor]] = [{}, {}]
    for holder in holders(config("ouro").model, LENGTH):
        whole = found[holder.parameter]
        for rank, own in enumerate(ranks):
            if holder.fused == "gate_up":
                share = torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)])
            else:
                share = whole if holder.tensor_axis is None else whole.chunk(2, holder.tensor_axis)[rank]
            own[holder.parameter] = share.clone()
    how(ranks)
    for rank, own in enumerate(ranks):
        torch.save({"module": own, "mp_world_size": 2}, there / f"global_step1/mp_rank_0{rank}_model_states.pt")
    return there


def test_what_two_ranks_hold_in_full_is_one(mesh, tmp_path):
    there, found = saved(mesh, tmp_path, "ouro")
    assert same(taken(split(there, found), tmp_path / "back"), joined(config("ouro"), [found], 1))


LINEAR = "core_block.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (lambda ranks: ranks[1]["readout.norm"][:1].nextafter_(torch.tensor(9.0)),
         r"mp_rank_01_model_states\.pt holds readout\.norm in full, as mp_rank_00_model_states\.pt does, and with other values"),
        (lambda ranks: [own["gate.bias"].fill_(sign) for own, sign in zip(ranks, (0.0, -0.0), strict=True)],
         r"mp_rank_01_model_states\.pt holds gate\.bias in full, .* with other values"),
        (lambda ranks: ranks[1].pop("readout.norm"),
         r"mp_rank_01_model_states\.pt lacks readout\.norm, which mp_rank_00_model_states\.pt of the same stage holds"),
        (lambda ranks: ranks[0].pop(LINEAR), rf"mp_rank_00_model_states\.pt lacks {LINEAR}, which mp_rank_01_model_states"),
        (lambda ranks: [ranks[1].pop(n) for n in list(ranks[1]) if n != LINEAR],
         rf"mp_rank_01_model_states\.pt holds {LINEAR}, which mp_rank_00_model_states\.pt of another stage holds too"),
        (lambda ranks: [own.update({LINEAR: torch.zeros(5)}) for own in ranks], rf"{LINEAR} has shape \[5\], must be \[48, 80\]"),
        (lambda ranks: [own.update({"head.weight": torch.ones(())}) for own in ranks], r"head\.weight has shape \[\], must be"),
    ],
    ids=["values", "sign", "one lacks", "first lacks", "two stages", "one axis", "no axis"],
)  # fmt: skip
def test_ranks_that_do_not_agree_are_told(mesh, tmp_path, how, sentence):
    there, found = saved(mesh, tmp_path, "ouro")
    with pytest.raises(CheckpointError, match=sentence):
        taken(split(there, found, how), tmp_path / "back")
    assert not (tmp_path / "back").exists() and not (tmp_path / "converting-back").exists()


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.to_sparse(),
        lambda t: t.to_sparse_csr(),
        lambda t: torch.nested.nested_tensor([t[:3], t[3:]]),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        lambda t: t.to("meta"),
    ],
    ids=["sparse", "csr", "nested", "quantised", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_told(mesh, tmp_path, other):
    there, _ = saved(mesh, tmp_path, "ouro")
    change(there / STATES, lambda held: held["module"].update({"head.weight": other(held["module"]["head.weight"])}))
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt holds head\.weight, which is no dense tensor"):
        taken(there, tmp_path / "back")


def test_ranks_that_are_missing_or_there_twice_are_told(mesh, tmp_path):
    there = split(*saved(mesh, tmp_path, "ouro"))
    second = there / "global_step1/mp_rank_01_model_states.pt"
    again = second.with_name("mp_rank_1_model_states.pt")
    again.write_bytes(second.read_bytes())
    with pytest.raises(UsageError, match=r"holds mp_rank_01_model_states\.pt and mp_rank_1_model_states\.pt, both of rank 1"):
        taken(there, tmp_path / "back")
    again.unlink()
    second.rename(second.with_name("mp_rank_02_model_states.pt"))
    with pytest.raises(CheckpointError, match=r"holds mp_rank_02_model_states\.pt and no mp_rank_01_model_states\.pt"):
        taken(there, tmp_path / "back")


def test_padding_of_three_ranks_is_stripped(mesh, tmp_path):
    there, found = saved(mesh, tmp_path, "ouro")
    padded = {n: torch.nn.functional.pad(found[n][:101], (0, 0, 0, 91), value=7.0) for n in ("embedding.weight", "head.weight")}
    change(there / STATES, lambda held: held["module"].update(padded))
    assert same(taken(there, tmp_path / "back"), joined(config("ouro"), [found], 1))


def test_files_that_are_missing_cut_or_of_zero_3_are_told(mesh, tmp_path):
    there, found = saved(mesh, tmp_path, "ouro")
    assert same(taken(placed(there / "global_step1", "ouro"), tmp_path / "of-the-step"), joined(config("ouro"), [found], 1))
    file, out = there / STATES, tmp_path / "back"
    whole = file.read_bytes()
    for damaged in (whole[:-200], whole[:50], b"", b"PK" + whole[2:200]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt cannot be read: .+"):
            taken(there, out)
    file.unlink()
    with pytest.raises(UsageError, match=r"holds no weights: no mp_rank_00_model_states\.pt"):
        taken(there, out)
    (there / "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(whole)
    with pytest.raises(UsageError, match=r"global_step1 is of ZeRO 3, .*; only ZeRO 0 and 1 can be read"):
        taken(there, out)
    for tag in ("global_step7", "../theirs", "", "\0"):
        (there / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match=r"latest names .*, which is no folder beside it"):
            taken(there, out)
    (there / "config.yaml").unlink()
    with pytest.raises(UsageError, match=r"config\.yaml does not exist; --config names"):
        taken(there, out)


def test_a_pickle_that_would_do_something_does_nothing(mesh, tmp_path):
    there, made = saved(mesh, tmp_path, "ouro")[0], tmp_path / "made"
    change(there / STATES, lambda held: held.update(trap=Trap(made)))
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt cannot be read"):
        taken(there, tmp_path / "back")
    assert not made.exists()
    torch.load(there / STATES, weights_only=False)
    assert made.exists()  # it would have


def test_the_command_reads_it_and_does_not_write_it(mesh, tmp_path, capsys):
    there, found = saved(mesh, tmp_path, "ouro")
    (there / "config.yaml").rename(tmp_path / "run.yaml")
    command = ["convert", str(there), str(tmp_path / "back"), "--from", "deepspeed", "--config", str(tmp_path / "run.yaml")]
    assert main(command) == 0
    assert "read back: logits of 32 random tokens at depth 1 and 2" in capsys.readouterr().out
    assert same(weights_in(tmp_path / "back"), joined(config("ouro"), [found], 1))
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "back"), str(tmp_path / "other"), "--to", "deepspeed"])
    with pytest.raises(UsageError, match="models are not written as checkpoints of DeepSpeed; --to megatron"):
        export(tmp_path / "back", "deepspeed", tmp_path / "other", Silent())
