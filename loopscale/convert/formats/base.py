"""What a format says of itself: its configuration in both directions, and a rule for each of its tensors."""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import read_small
from loopscale.config import Config
from loopscale.convert.mapping import Rule
from loopscale.convert.tensors import Planned, Shards, Source, write_shards
from loopscale.durable import write_json
from loopscale.errors import CheckpointError, UsageError

CONFIG = "config.json"
Values = dict[str, dict[str, Any]]
"""Values of our configuration, by section and key."""


@dataclass(frozen=True)
class Need:
    """A value that a model of ours must have to be of a format."""

    key: str
    """Dotted."""
    allowed: tuple[Any, ...]


def unmet(config: Config, needs: Sequence[Need]) -> str | None:
    """Which value is another than the first need that is not met, and what it must be."""
    model = config.model
    usual = {
        "model.kv_heads": model.key_value_heads == model.heads,
        "model.head_dim": model.head_width * model.heads == model.hidden_size,
    }
    for need in needs:
        section, key = need.key.split(".")
        found = None if usual.get(need.key) else getattr(getattr(config, section), key)
        if found not in need.allowed:
            return f"{need.key} is {found}, must be {' or '.join(map(str, need.allowed))}"
    return None


class Format(ABC):
    """One format. Formats have no state: they are used as they are."""

    name: ClassVar[str]
    written: ClassVar[bool] = True
    """Whether models of ours are written in it, and not read only."""
    configuration: ClassVar[str] = CONFIG
    """The file that tells of the model."""
    needs: ClassVar[Sequence[Need]]
    """What the format's own code does and cannot be asked to do otherwise."""
    buffers: ClassVar[Sequence[str]] = ()
    """Names of tensors that follow from the configuration and are not read."""
    tokenizer: ClassVar[str] = "tokenizer.json"
    """Where that file lies in a folder of theirs."""
    numbered: ClassVar[bool] = False
    """Whether a shard that is alone has a number and an index too."""

    def recognises(self, place: Path) -> bool:
        """Whether what lies at ``place`` is of this format."""
        return (place / CONFIG).is_file() and self.describes(self.read_about(place))

    @abstractmethod
    def describes(self, about: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is one of this format."""

    def read_about(self, place: Path) -> Mapping[str, Any]:
        """What is written at ``place`` of the model: its `config.json`. Raises :class:`UsageError` where it is not there and
        :class:`CheckpointError` where it cannot be read."""
        if not (place / CONFIG).is_file():
            raise UsageError(f"{place} has no {CONFIG}; give a folder with a model's {CONFIG} and weights")
        try:
            about = json.loads(read_small(place, CONFIG, store.CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{place / CONFIG} cannot be read ({error})") from None
        if not isinstance(about, dict):
            raise CheckpointError(f"{place / CONFIG} does not hold keys and values")
        return about

    def write_about(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Writes what :meth:`read_about` reads."""
        write_json(folder / CONFIG, about)

    def source(self, place: Path, config: Config) -> Source:
        """The tensors that lie at ``place``, of the model that ``config`` tells."""
        return Shards(place)

    def tokenizer_file(self, place: Path, scratch: Path) -> Path:
        """The `tokenizer.json` that lies at ``place``, or one that was made of what does, in ``scratch``; it may be missing."""
        own = place / self.tokenizer
        return own if own.is_file() else place / "tokenizer.json"

    def write(
        self, folder: Path, config: Config, tensors: Sequence[Planned], dtype: torch.dtype, shard_bytes: int
    ) -> Iterator[int]:
        """Writes what :meth:`source` reads, in files of at most ``shard_bytes``, larger tensors aside; yields bytes written.
        Files that are there already are whole, and stay."""
        yield from write_shards(folder, tensors, dtype, shard_bytes, self.numbered)

    @abstractmethod
    def values(self, about: Mapping[str, Any]) -> Values:
        """Our configuration of their `config.json`. Raises :class:`CheckpointError` naming a value that ours cannot have."""

    @abstractmethod
    def about(self, config: Config) -> dict[str, Any]:
        """Their `config.json` of a configuration of ours that fits."""

    @abstractmethod
    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        """A rule for each tensor that they hold."""

    def finish(  # noqa: B027  # most have no more
        self, folder: Path, config: Config, dtype: torch.dtype, run: Path | None, checkpoint: str
    ) -> None:
        """Writes what else a folder of theirs holds, beside weights of type ``dtype``, config.json and tokenizer.json.
        ``checkpoint`` is the name of ours, ``run`` the folder of its run, if it lies in one."""

    def logits(self, folder: Path, tokens: Tensor, depths: Sequence[int]) -> Tensor | None:
        """Logits of ``tokens`` int64 [1, S] by their own code in fp32, [depths, S, V], where that code is at hand. Raises
        :class:`CheckpointError` where it does not load the folder."""
        return None

    def tied(self, config: Config) -> Mapping[str, str]:
        """Names that stand for the tensor of another one where weights are tied, and that one's name."""
        return {}

    def damage(self, folder: Path) -> str | None:
        """A sentence on a file in a folder of theirs that is not what a list of digests there says, if there is one."""
        return None

    def unlike(self, config: Config, names: Collection[str]) -> str | None:
        """What the names of their tensors tell of a design that ours is not, if they do."""
        return None

    def refuse_unfit(self, config: Config) -> None:
        """Raises :class:`UsageError` naming the first property of the model that the format does not have."""
        if (wrong := unmet(config, self.needs)) is not None:
            raise UsageError(f"the model cannot be of the format {self.name}: {wrong} there")

    def refuse_other(self, config: Config, key: str, value: float) -> None:
        """As :meth:`refuse_unfit`, of a number that the format's code works out."""
        section, name = key.split(".")
        found = getattr(getattr(config, section), name)
        if found is None or not math.isclose(found, value, rel_tol=1e-6):
            raise UsageError(f"the model cannot be of the format {self.name}: {key} is {found}, must be {value:.6g} there")


def wanted(about: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    """A value that a `config.json` must have; raises :class:`CheckpointError` where it is not there or of another kind."""
    if key not in about:
        raise CheckpointError(f"config.json has no {key}, which cannot be told from the weights")
    value = about[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not {bool, object} & set(kinds)):
        named = " or ".join(k.__name__ for k in kinds)
        raise CheckpointError(f"config.json: {key} is {value!r}, must be {named}")
    return value


def count(about: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number that a `config.json` must have; raises as :func:`wanted`."""
    value: int = wanted(about, key, int)
    if value < least:
        raise CheckpointError(f"config.json: {key} is {value}, must be at least {least}")
    return value


def number(about: Mapping[str, Any], key: str) -> float:
    """A number above 0 that a `config.json` must have; raises as :func:`wanted`."""
    value = wanted(about, key, (int, float))
    if not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json: {key} is {value!r}, must be a number above 0")
    return float(value)


def must_be(about: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Raises :class:`CheckpointError` where a value is there and is none that our model can have."""
    if key in about and about[key] not in allowed:
        raise CheckpointError(f"config.json: {key} is {about[key]!r}; only {' or '.join(map(repr, allowed))} can be read")


TRANSFORMERS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
}  # fmt: skip
"""Counts of `model` and what transformers' own models call them."""


def values_of_transformers(about: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `model` that a `config.json` of transformers' own models tells; raises as :func:`wanted`."""
    return {
        **{ours: count(about, theirs) for ours, theirs in TRANSFORMERS.items()},
        "head_dim": None if about.get("head_dim") is None else count(about, "head_dim"),
        "tied_head": wanted(about, "tie_word_embeddings", bool),
        "norm_eps": number(about, "rms_norm_eps"),
    }


def as_transformers_has_it(config: Config) -> dict[str, Any]:
    """The other way, with positions."""
    model = config.model
    settled = {"vocab_size": model.vocabulary, "kv_heads": model.key_value_heads}
    return {
        **{theirs: settled.get(ours) or getattr(model, ours) for ours, theirs in TRANSFORMERS.items()},
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.corpus.sequence_length,
        "rope_theta": model.rope_base,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
    }
