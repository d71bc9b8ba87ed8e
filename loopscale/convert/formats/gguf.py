"""GGUF files of Llama models (llama.cpp), quantised or not, read only: weights are made fp32.

Positions turn neighbouring channels of a head there. The tokenizer is made of the one in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from loopscale.config import Config
from loopscale.convert.formats.llama import Llama
from loopscale.convert.mapping import Turn
from loopscale.convert.tensors import Source, reason
from loopscale.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

MAGIC = b"GGUF"
TENSORS = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight", "layer": "blk.{}.",
    "attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "out": "attn_output",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
SCALED = "rope_freqs.weight"
KEYS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length", "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "vocab_size": "vocab_size",
}  # fmt: skip
"""Keys of a `config.json` and theirs behind `llama.`."""
UNTOLD = ("num_key_value_heads", "head_dim", "rope_theta", "vocab_size")
"""Those that may be left out."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",), "rope.scaling.factor": (1.0, 0.0), "rope.scale_linear": (1.0, 0.0),
    "attention.sliding_window": (0,), "attention.causal": (True,), "logit_scale": (1.0, 0.0), "expert_count": (0,),
}  # fmt: skip
"""What may be said behind `llama.`: nothing that a plain Llama does not do."""
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that stand for themselves in text; the former have a meaning for the model."""


class Gguf(Llama):
    name: ClassVar = "gguf"
    written: ClassVar = False
    tensors: ClassVar = TENSORS
    turn: ClassVar[Turn] = "pairs"

    def recognises(self, place: Path) -> bool:
        if not place.is_file():
            return False
        with place.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def read_about(self, place: Path) -> Mapping[str, Any]:
        """As Llama's `config.json`."""
        if not place.is_file():
            raise UsageError(f"{place} is no file; give the .gguf itself")
        file = _File(place)
        kind = file.value("general.architecture")
        if kind != "llama":
            raise CheckpointError(f"{place} holds a model of the architecture {kind!r}; only 'llama' can be read")
        about = {key: file.value(f"llama.{theirs}") for key, theirs in KEYS.items()}
        if missing := [theirs for key, theirs in KEYS.items() if about[key] is None and key not in UNTOLD]:
            raise CheckpointError(f"{place} has no llama.{missing[0]}, which cannot be told from the weights")
        for key, allowed in PLAIN.items():
            if (value := file.value(f"llama.{key}")) is not None and value not in allowed:
                raise CheckpointError(f"{place}: llama.{key} is {value!r}; only {allowed[0]!r} can be read")
        width = about["head_dim"] or about["hidden_size"] // max(1, about["num_attention_heads"])
        for key in ("rope.dimension_count", "attention.value_length"):
            if (value := file.value(f"llama.{key}")) not in (None, width):
                raise CheckpointError(f"{place}: llama.{key} is {value!r}; only the width of a head, {width}, can be read")
        if SCALED in file.names:
            raise CheckpointError(f"{place} has {SCALED}: its rotary frequencies are scaled, as Llama 3.1's are; ours cannot be")
        if TENSORS["embed"] in file.names:
            about["vocab_size"] = about["vocab_size"] or file.shape(TENSORS["embed"])[0]
        about["tie_word_embeddings"] = TENSORS["head"] not in file.names
        return {"model_type": "llama", **{key: value for key, value in about.items() if value is not None}}

    def source(self, place: Path, config: Config) -> Source:
        return _File(place)

    def tokenizer_file(self, place: Path, scratch: Path) -> Path:
        path = scratch / "tokenizer.json"
        path.write_text(_tokenizer(_File(place)))
        return path

    def about(self, config: Config) -> dict[str, Any]:
        raise UsageError("models are not written as GGUF; write --to llama, and make one of that with llama.cpp")


class _File:
    """The tensors and values of a file; see :class:`Source`. Tensors are mapped, and made fp32 when they are read."""

    def __init__(self, path: Path):
        self._path = path

    @cached_property
    def _reader(self) -> GGUFReader:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise UsageError("GGUF files are read by the package gguf, which is not installed; pip install gguf") from None
        try:
            return GGUFReader(self._path)
        except Exception as error:  # a changed byte leads it to any of them
            raise CheckpointError(f"{self._path} cannot be read as GGUF: {reason(error)}") from None

    @cached_property
    def _tensors(self) -> dict[str, ReaderTensor]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def value(self, key: str) -> Any:
        """Of the file's own key; None where it is not there. Numbers of 32 bits are given as they were written in decimals."""
        field = self._reader.get_field(key)
        if field is None:
            return None
        try:
            value = field.contents()
        except Exception as error:
            raise CheckpointError(f"{self._path}: {key} cannot be read: {reason(error)}") from None
        return float(str(np.float32(value))) if isinstance(value, float) else value

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    @property
    def stamps(self) -> list[tuple[str, int, int]]:
        stat = self._path.stat()
        return [(self._path.name, stat.st_size, stat.st_mtime_ns)]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensors[name].shape.tolist()))

    def read(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise CheckpointError(f"{self._path}: {name} is of the type {kind}, which the package gguf cannot read") from None
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(self.shape(name))


def _tokenizer(file: _File) -> str:
    """A tokenizer.json of the byte-level BPE that a file holds."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def byte_level() -> Any:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)

    before = {  # their names of how text is cut before pairs are merged
        "gpt-2": byte_level,
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    }
    kind, cut = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in before:
        raise UsageError(
            f"the file's tokenizer is of the kind {kind!r} with {cut!r}, of which none is made here (only 'gpt2' with "
            f"{' or '.join(map(repr, before))}); --tokenizer names its tokenizer.json"
        )
    tokens, merges, types = (file.value(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "merges", "token_type"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    except Exception as error:  # the library's own has no other type
        raise CheckpointError(f"the file's tokenizer cannot be read: {error}; --tokenizer names its tokenizer.json") from None
    tokenizer.pre_tokenizer, tokenizer.decoder = before[cut](), decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=False):
        if type_ in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=type_ == CONTROL, normalized=False)])
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
