"""xLLM-Loop (arXiv 2610.06833, part II of the release): prelude, core and coda of Llama blocks, or dense.

Norm gains are stored less 1, positions pair neighbouring channels. config.json holds the model's values as `model`; values that
it leaves out have the defaults of the release's code. `artifact_manifest.json` lists all files with their digests; the release's
own are in bf16, and its code takes no others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from loopscale.checkpoint.commit import MANIFEST_BYTES, File, damage, read_small
from loopscale.config import Config
from loopscale.convert.formats.base import Format, Need, Values, count, must_be, number, wanted
from loopscale.convert.mapping import Ours, Rule
from loopscale.convert.tensors import INDICES
from loopscale.corpus.tokenizer import end_of_text, load_tokenizer
from loopscale.durable import file_digest, write_json
from loopscale.errors import CheckpointError

HALF_LOG_FIVE = 0.5 * math.log(5)


MANIFEST = "artifact_manifest.json"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Xllm(Format):
    name: ClassVar = "xllm"
    tokenizer: ClassVar = "tokenizer/tokenizer.json"
    numbered: ClassVar = True
    needs: ClassVar = (
        Need("model.layer_norm", ("pre",)),
        Need("model.activation", ("swiglu",)),
        Need("model.inject", ("ortho", "diagonal", "parcae", "huginn_linear")),
        Need("model.state_init", ("normal",)),
        Need("model.between", ("none", "unit")),
        Need("model.readout", ("rmsnorm",)),
        Need("model.positions", ("rope",)),
        Need("model.qk_norm", (False,)),
        Need("model.qk_bias", (False,)),
        Need("model.value_embeddings", (False,)),
        Need("model.coda_norm", (False,)),
        Need("model.coda_linear", (False,)),
        Need("model.exit_gate", ("none",)),
        Need("model.tied_head", (False,)),
        Need("model.embedding_multiplier", (1.0,)),
    )

    def describes(self, about: Mapping[str, Any]) -> bool:
        model = about.get("model")
        return isinstance(model, dict) and model.get("arch") == "huginn"

    def values(self, about: Mapping[str, Any]) -> Values:
        theirs = wanted(about, "model", dict)
        for key, *allowed in (
            ("arch", "huginn"), ("swiglu", True), ("apply_rmsnorm", True), ("qknorm", False), ("apply_attn_gate", False),
            ("residual_func", "base", "add"), ("layernorm_num_groups", 1), ("norm_affine", True), ("num_experts", 0),
            ("scale_emb", False), ("huginn_hierarchical_state", "none"), ("huginn_state_init", "normal"),
            ("huginn_input_injection", "diagonal", "linear"), ("huginn_recurrent_exit_norm", "none", "parameterless_rms"),
            ("huginn_diagonal_a_init", 1.0), ("huginn_ortho_projection_eps", 1e-6), ("output_size", -1, theirs.get("vocab_size")),
        ):  # fmt: skip
            must_be(theirs, key, *allowed)
        wanted(theirs, "huginn_state_init", str)
        width, heads = count(theirs, "model_dim"), count(theirs, "num_heads")
        head = theirs.get("head_dim") or width // heads
        must_be(theirs, "rope_head_dim", None, head)
        linear = theirs.get("huginn_input_injection") == "linear"
        drawn = theirs.get("huginn_sampling_scheme", "fixed") != "fixed"
        learned = theirs.get("huginn_depth_prior", "none") == "learned"
        prelude, coda = count(theirs, "huginn_prelude_layers", 0), count(theirs, "huginn_coda_layers", 0)
        return {
            "model": {
                "vocab_size": count(theirs, "vocab_size"),
                "hidden_size": width,
                "heads": heads,
                "kv_heads": theirs.get("num_kv_heads") or heads,
                "head_dim": head,
                "ffn_size": count(theirs, "ffn_hidden_dim"),
                "prelude_layers": prelude,
                "core_layers": theirs.get("huginn_recurrent_layers") or count(theirs, "num_layers") - prelude - coda,
                "coda_layers": coda,
                "inject": self._injection(theirs),
                "inject_bias": linear and theirs.get("apply_bias_term", False),
                "between": "unit" if theirs.get("huginn_recurrent_exit_norm", "none") != "none" else "none",
                "state_init": "normal",
                "rope_base": number(theirs, "rope_base"),
                "norm_eps": number(theirs, "rmsnorm_eps"),
                "norm_centered": True,
            },
            "depth": {
                "prior": "learned" if learned else "pln" if drawn else "fixed",
                "mean": number(theirs, "huginn_poisson_lognormal_target_mean" if drawn else "loop_times"),
                "sigma": theirs.get("huginn_poisson_lognormal_sigma", 0.5),
                "cap": theirs.get("huginn_poisson_lognormal_max", 64),
                "entropy_coef": theirs.get("huginn_depth_prior_entropy", 0.0),
                "backprop": theirs.get("huginn_backprop_depth"),
            },
            "corpus": {"sequence_length": 8192},  # the file does not say; the release trains and evaluates at this
        }

    @staticmethod
    def _injection(theirs: Mapping[str, Any]) -> str:
        found = {
            "huginn_linear": theirs.get("huginn_input_injection") == "linear",
            "ortho": theirs.get("huginn_prelude_orthogonal", False),
            "parcae": theirs.get("huginn_prelude_norm", "none") != "none",
        }
        kinds = [kind for kind, is_there in found.items() if is_there]
        if len(kinds) > 1:
            keys = "huginn_input_injection linear, huginn_prelude_orthogonal and huginn_prelude_norm"
            raise CheckpointError(f"config.json: of {keys} only one can be read")
        return kinds[0] if kinds else "diagonal"

    def about(self, config: Config) -> dict[str, Any]:
        model, depth = config.model, config.depth
        drawn = depth.prior in ("pln", "learned")
        return {
            "model": {
                "arch": "huginn",
                "huginn_depth_control": True,
                "num_layers": model.prelude_layers + model.core_layers + model.coda_layers,
                "model_dim": model.hidden_size,
                "num_heads": model.heads,
                "num_kv_heads": model.key_value_heads,
                "head_dim": model.head_width,
                "ffn_hidden_dim": model.ffn_size,
                "vocab_size": model.vocabulary,
                "swiglu": True,
                "apply_bias_term": model.inject_bias,
                "apply_rmsnorm": True,
                "rmsnorm_eps": model.norm_eps,
                "attn_gate_func": "silu",
                "rope_base": model.rope_base,
                "rope_head_dim": model.head_width,
                "chunk_size": 1024,
                "causal_attn_backend": "flash",
                "fused_block": False,
                "init_mode": "gaussian",
                "init_std": model.init_std,
                "loop_times": depth.evaluation_depth,
                "loop_start_layer": model.prelude_layers,
                "loop_end_layers": model.prelude_layers + model.core_layers,
                "huginn_prelude_layers": model.prelude_layers,
                "huginn_recurrent_layers": model.core_layers,
                "huginn_coda_layers": model.coda_layers,
                "huginn_state_init": "normal",
                "huginn_input_injection": "linear" if model.inject == "huginn_linear" else "diagonal",
                "huginn_recurrent_exit_norm": "parameterless_rms" if model.between == "unit" else "none",
                "huginn_diagonal_dt_init": 1.0 if model.inject == "diagonal" else HALF_LOG_FIVE,
                "huginn_prelude_norm": "rms" if model.inject == "parcae" else "none",
                "huginn_prelude_orthogonal": model.inject == "ortho",
                "huginn_sampling_scheme": "poisson-lognormal-capped" if drawn else "fixed",
                "huginn_poisson_lognormal_target_mean": depth.mean,
                "huginn_poisson_lognormal_sigma": depth.sigma,
                "huginn_poisson_lognormal_max": depth.cap,
                "huginn_backprop_depth": depth.backprop,
                "huginn_depth_prior": "learned" if depth.prior == "learned" else "none",
                "huginn_depth_prior_entropy": depth.entropy_coef if depth.prior == "learned" else 0.0,
            },
            "tokenizer": {"type": "huggingface", "path": "tokenizer"},
        }

    def finish(self, folder: Path, config: Config, dtype: torch.dtype, run: Path | None, checkpoint: str) -> None:
        """What the tokenizer is, as `transformers` reads it, and the list of all files with their digests."""
        words = folder / self.tokenizer
        tokenizer = load_tokenizer(words)
        special = {"eos_token": tokenizer.id_to_token(end_of_text(tokenizer, words))}
        write_json(words.with_name("tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast", **special})
        write_json(words.with_name("special_tokens_map.json"), special)
        index = json.loads((folder / INDICES[0]).read_bytes())
        found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        manifest = {
            "schema_version": 1,
            "release": "paper-part2",
            "format": f"xllm-native-{NAMES[dtype]}-safetensors",
            "source": {"program": "loopscale"},
            "model": {
                "dtype": str(dtype).removeprefix("torch."),
                "index": INDICES[0],
                "tensor_count": len(index["weight_map"]),
                "shards": len(set(index["weight_map"].values())),
            },
            "files": [
                {"path": name, "sha256": file_digest(path), "size_bytes": path.stat().st_size}
                for path in found
                if (name := path.relative_to(folder).as_posix()) != MANIFEST
            ],
        }
        compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))  # as the release's code takes the digest
        write_json(folder / MANIFEST, {**manifest, "manifest_sha256": hashlib.sha256(compact.encode()).hexdigest()})

    def refuse_unfit(self, config: Config) -> None:
        super().refuse_unfit(config)
        if config.model.state_std is not None:
            self.refuse_other(config, "model.state_std", config.model.hidden_size**-0.5)

    def damage(self, folder: Path) -> str | None:
        if not (folder / MANIFEST).is_file():
            return None
        try:
            listed = json.loads(read_small(folder, MANIFEST, MANIFEST_BYTES))["files"]
            files = [File(str(f["path"]), int(f["size_bytes"]), str(f["sha256"])) for f in listed]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return f"{folder / MANIFEST} cannot be read ({error!r})"
        return damage(folder, files)

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        model, ours = config.model, Ours.of(config.model, config.corpus.sequence_length)
        rules = [ours.same("embed.weight", "embedding.tokens")]
        for i, layer in enumerate(ours.layers()):
            attention, mlp = f"layers.{i}.attention", f"layers.{i}.nffn"
            rules.append(ours.gain(f"{attention}.norm.weight", f"{layer}.attention_norm", centered=True))
            rules += [ours.turned(f"{attention}.w{x}.weight", f"{layer}.{x}", turn="pairs") for x in "qkv"]
            rules.append(ours.same(f"{attention}.wo.weight", f"{layer}.out"))
            rules.append(ours.gain(f"{mlp}.norm.weight", f"{layer}.mlp_norm", centered=True))
            rules += [ours.same(f"{mlp}.fc{n}.weight", f"{layer}.{x}") for n, x in ((1, "gate"), (2, "down"), (3, "up"))]
        if model.inject == "huginn_linear":
            names = ("weight", "bias") if model.inject_bias else ("weight",)
            rules += [ours.same(f"input_injection.adapter.{x}", f"inject.{x}") for x in names]
        else:
            rules += [ours.same(f"input_injection.{x}", f"inject.{x}") for x in ("A_log", "dt_bias")]
            rules.append(ours.same("input_injection.input_adapter.weight", "inject.weight"))
        if model.inject == "parcae":
            rules.append(ours.gain("huginn_prelude_norm_module.weight", "inject.norm", centered=True))
        rules.append(ours.gain("output.final_norm.weight", "readout.norm", centered=True))
        rules.append(ours.same("output.output.weight", "head"))
        return rules
