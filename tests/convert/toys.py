"""Toy models of each format's design, with every weight off its first value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopscale.config import Config, from_values
from loopscale.convert.mapping import Ours
from loopscale.model.parameters import Weight

SHAPE = {"hidden_size": 48, "heads": 4, "ffn_size": 80}
MODELS: dict[str, dict[str, Any]] = {
    "huginn": {
        **SHAPE, "prelude_layers": 1, "core_layers": 2, "coda_layers": 1, "layer_norm": "sandwich", "qk_bias": True,
        "embedding_multiplier": 48**0.5, "inject": "huginn_linear", "state_init": "truncated_normal", "state_std": 0.4**0.5,
        "coda_norm": True, "tied_head": True, "rope_base": 5e4, "norm_centered": False,
    },
    "ouro": {
        **SHAPE, "kv_heads": 2, "prelude_layers": 0, "core_layers": 3, "coda_layers": 0, "layer_norm": "branch", "inject": "none",
        "state_init": "embedding", "between": "shared", "exit_gate": "normed", "rope_interleaved": False, "norm_centered": False,
    },
    "parcae": {
        **SHAPE, "prelude_layers": 2, "core_layers": 2, "coda_layers": 2, "activation": "relu2", "qk_norm": True,
        "value_embeddings": True, "inject": "parcae", "state_init": "truncated_normal", "state_std": (2 / 240) ** 0.5,
        "coda_linear": True, "tied_head": True, "rope_base": 5e4, "norm_eps": 1e-5, "norm_centered": False,
    },
    "hf": {
        **SHAPE, "kv_heads": 2, "prelude_layers": 0, "core_layers": 2, "coda_layers": 1, "inject": "add", "state_init": "zero",
        "between": "rmsnorm", "coda_linear": True, "readout": "alpha", "positions": "learned", "embedding_multiplier": 2.0,
    },
    "xllm": {**SHAPE, "kv_heads": 2, "head_dim": 16, "prelude_layers": 1, "core_layers": 2, "coda_layers": 1},
    "llama": {
        **SHAPE, "kv_heads": 2, "prelude_layers": 0, "core_layers": 4, "coda_layers": 0, "inject": "none",
        "state_init": "embedding", "rope_base": 1e5, "norm_eps": 1e-5, "rope_interleaved": False, "norm_centered": False,
    },
}  # fmt: skip
VOCABULARY, LENGTH = 101, 32


def config(name: str, **changes: Any) -> Config:
    model = {"vocab_size": VOCABULARY, **MODELS[name], **changes}
    depth = {"prior": "fixed", "mean": 1 if name == "llama" else 3, "backprop": None}
    rest = {
        "corpus": {"sequence_length": LENGTH},
        "batch": {"global_batch": 1},
        "objective": {"kind": "exit_gate" if name == "ouro" else "terminal"},
    }
    return from_values(Config, {"model": model, "depth": depth, **rest}).config


def weights(of: Config, seed: int = 0, spread: float = 0.3) -> dict[str, Tensor]:
    """Random weights by global name, of standard deviation ``spread``; gains near 1, whichever way they are stored."""
    generator = torch.Generator().manual_seed(seed)

    def one(weight: Weight) -> Tensor:
        values = torch.randn(weight.shape, generator=generator) * spread
        return values + float(not of.model.norm_centered) if weight.kind == "norm" else values

    return {name: one(weight) for name, weight in Ours.of(of.model, of.corpus.sequence_length).weights.items()}
