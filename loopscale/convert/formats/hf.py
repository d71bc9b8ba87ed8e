"""A folder that `transformers` loads without loopscale: our tensors as they are, and `modeling_loopscale.py`, which runs them.

It holds every design that ours does. Tensors have our names, those of matrices and gains with ``.weight`` behind; rows lie and
gains are stored as the model has them.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopscale.config import Config
from loopscale.convert.card import card
from loopscale.convert.formats.base import Format, Need, Values, must_be, wanted
from loopscale.convert.mapping import Ours, Rule
from loopscale.corpus.tokenizer import end_of_text, load_tokenizer
from loopscale.durable import write_json
from loopscale.errors import CheckpointError
from loopscale.model.norm import HEAD_EPS

MODELING = "modeling_loopscale"
FORMAT_VERSION = 1
"""Of names and values in `config.json` and of names of tensors."""
BY_NAME = {
    "hidden_size": "hidden_size", "ffn_size": "intermediate_size", "heads": "num_attention_heads", "head_dim": "head_dim",
    "kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps", "prelude_layers": "prelude_layers",
    "core_layers": "core_layers", "coda_layers": "coda_layers", "activation": "activation", "layer_norm": "layer_norm",
    "qk_norm": "qk_norm", "qk_bias": "qk_bias", "value_embeddings": "value_embeddings", "inject": "inject",
    "embedding_multiplier": "embedding_multiplier", "inject_bias": "inject_bias", "state_init": "state_init",
    "state_std": "state_std", "between": "between", "coda_norm": "coda_norm", "coda_linear": "coda_linear", "readout": "readout",
    "tied_head": "tied_head", "exit_gate": "exit_gate", "positions": "positions", "rope_base": "rope_base",
    "rope_interleaved": "rope_interleaved", "norm_centered": "norm_centered",
}  # fmt: skip
"""Keys of `model` and theirs."""
SETTLED = {"kv_heads": "key_value_heads", "head_dim": "head_width", "vocab_size": "vocabulary", "state_std": "noise_std"}
"""Keys whose value may be left out in ours, and what has it then."""
NOISY = ("normal", "truncated_normal")

ALONE = """
import sys

class NotHere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "loopscale":
            raise ImportError("the exported model is to work without loopscale")

sys.meta_path.insert(0, NotHere())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, probe, found, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).float().eval()
with torch.no_grad():
    probe = load_file(probe)
    visits = [{"depth": depth} if model.config.model_type == "loopscale" else {} for depth in probe["depths"].tolist()]
    logits = [model(probe["tokens"], **own).logits for own in visits]
    save_file({"logits": torch.cat(logits)}, found)
"""
"""Loads a folder as its users do."""


class Hf(Format):
    name: ClassVar = "hf"
    needs: ClassVar = (
        Need("model.inject", ("none", "add", "huginn_linear", "diagonal", "parcae", "ortho")),  # and none that was added to ours
        Need("model.readout", ("rmsnorm", "raw", "final_only", "alpha")),
    )

    def describes(self, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") == "loopscale"

    def values(self, about: Mapping[str, Any]) -> Values:
        if (version := about.get("format_version", 1)) != FORMAT_VERSION:
            sentence = f"this version of loopscale reads {FORMAT_VERSION}: use a newer one"
            raise CheckpointError(f"config.json: format_version is {version!r}; {sentence}")
        model = {ours: wanted(about, theirs, (bool, int, float, str)) for ours, theirs in BY_NAME.items()}
        noisy, gated = model["state_init"] in NOISY, model["exit_gate"] != "none"
        if model["qk_norm"]:
            must_be(about, "qk_norm_eps", HEAD_EPS)
        return {
            "model": {**model, "state_std": model["state_std"] if noisy else None},
            "depth": {"prior": "fixed", "mean": wanted(about, "depth", int), "backprop": None},
            "objective": {"kind": "exit_gate" if gated else "terminal"},
            "corpus": {"sequence_length": wanted(about, "max_position_embeddings", int)},
            "run": {"seed": wanted(about, "state_seed", int)},
        }

    def about(self, config: Config) -> dict[str, Any]:
        model = config.model
        return {
            "architectures": ["LoopscaleForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{MODELING}.LoopscaleConfig",
                "AutoModelForCausalLM": f"{MODELING}.LoopscaleForCausalLM",
            },
            "model_type": "loopscale",
            "format_version": FORMAT_VERSION,
            **{theirs: getattr(model, SETTLED.get(ours, ours)) for ours, theirs in BY_NAME.items()},
            "qk_norm_eps": HEAD_EPS,
            "depth": config.depth.evaluation_depth,
            "max_position_embeddings": config.corpus.sequence_length,
            "state_seed": config.run.seed,
        }

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        ours = Ours.of(config.model, config.corpus.sequence_length)
        return [ours.same(_theirs(weight.name, weight.kind), weight.name) for weight in ours.weights.values()]

    def finish(self, folder: Path, config: Config, dtype: torch.dtype, run: Path | None, checkpoint: str) -> None:
        write_tokenizer_config(folder, config.corpus.sequence_length)
        shutil.copyfile(Path(__file__).with_name(f"{MODELING}.py"), folder / f"{MODELING}.py")
        parameters = sum(math.prod(w.shape) for w in Ours.of(config.model, config.corpus.sequence_length).weights.values())
        (folder / "README.md").write_text(card(config, parameters, run, checkpoint))

    def logits(self, folder: Path, tokens: Tensor, depths: Sequence[int]) -> Tensor:
        return by_transformers(folder, tokens, depths)


def write_tokenizer_config(folder: Path, length: int) -> None:
    """Writes what transformers asks for beside the `tokenizer.json` in ``folder``, of a model of ``length`` positions, and which
    token ends a text that it generates."""
    path = folder / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    end = end_of_text(tokenizer, path)
    word = tokenizer.id_to_token(end)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": word,
            "pad_token": word,
            "padding_side": "left",
            "model_max_length": length,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,  # as in training: text that spells one does not end a document
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})


def by_transformers(folder: Path, tokens: Tensor, depths: Sequence[int]) -> Tensor:
    """Logits of ``tokens`` int64 [1, S] at each depth, [depths, S, V], by transformers in a process of its own from which
    loopscale cannot be imported. Raises :class:`CheckpointError` where it does not load the folder."""
    with tempfile.TemporaryDirectory(prefix="loopscale-") as place:
        probe, found = Path(place) / "probe.safetensors", Path(place) / "found.safetensors"
        save_file({"tokens": tokens, "depths": torch.tensor(depths)}, probe)
        environment = {**os.environ, "HF_MODULES_CACHE": f"{place}/modules", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-I", "-c", ALONE, str(folder.resolve()), str(probe), str(found), str(torch.get_num_threads())],
            cwd=place, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode < 0:
            raise CheckpointError(
                f"transformers was ended by signal {-done.returncode} as it read what was written, as where memory is short: it "
                f"takes as much as the weights do"
            )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckpointError(f"transformers does not load what was written: {last}")
        return load_file(found)["logits"]


def _theirs(name: str, kind: str) -> str:
    if name.endswith(("q_bias", "k_bias")):
        return f"{name.removesuffix('_bias')}.bias"
    whole = kind in ("matrix", "embedding", "norm", "coda_linear") and not name.endswith(".weight")
    return f"{name}.weight" if whole else name
