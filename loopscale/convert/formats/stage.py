"""What formats have in common that hold a stage of ours as its modules have it (``model/stage.py``).

Tensors have the names of the stage's parameters and lie as those do: q, k and v in one matrix, grouped by key/value head as
[q of the group, k, v]; gate above up; norm gains as the model has them; layers by their number in prelude, core and coda,
whichever stage held them; a vocabulary padded to a multiple of 64 and of the number of ranks that shared it. The model's
configuration is a run's `config.yaml` and its tokenizer a `tokenizer.json`, which lie beside or are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import read_small
from loopscale.config import Config, from_values
from loopscale.config.load import parse_yaml
from loopscale.config.tree import ModelConfig
from loopscale.convert.formats.base import Format, Values
from loopscale.convert.mapping import Ours, Rule
from loopscale.durable import replacing
from loopscale.errors import CheckpointError, UsageError
from loopscale.model.weights import holders

LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
ENGINE = "self_attention.core_attention.engine"
"""Transformer Engine's attention, where a GPU ran it."""


class StageFormat(Format):
    configuration: ClassVar = "config.yaml"
    needs: ClassVar = ()

    def describes(self, about: Mapping[str, Any]) -> bool:
        return False

    def read_about(self, place: Path) -> Mapping[str, Any]:
        """Of the folder ``place``, or the file."""
        path = place if place.is_file() else place / self.configuration
        if not path.is_file():
            raise UsageError(f"{path} does not exist; --config names the config.yaml of the run that trained the model")
        try:
            text = read_small(path.parent, path.name, store.CONFIG_BYTES).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from None
        about = parse_yaml(text, str(path), aliases=False)
        if not isinstance(about, dict):
            raise CheckpointError(f"{path} does not hold keys and values")
        if _vocabulary(about) is None:
            from_values(Config, {"batch": {"global_batch": 1}, **about}, str(path))  # has more to say, where more is wrong
            raise UsageError(f"{path}: model.vocab_size is null; give the config.yaml of the run, which has the tokenizer's size")
        return about

    def write_about(self, folder: Path, about: Mapping[str, Any]) -> None:
        with replacing(folder / self.configuration) as out:
            out.write(yaml.safe_dump(dict(about), sort_keys=False).encode())

    def values(self, about: Mapping[str, Any]) -> Values:
        return dict(about)

    def about(self, config: Config) -> dict[str, Any]:
        return config.model_dump(mode="json")

    def rules(self, config: Config, about: Mapping[str, Any]) -> list[Rule]:
        ours = Ours.of(config.model, config.corpus.sequence_length)
        return [ours.held(holder) for holder in holders(config.model, config.corpus.sequence_length)]


def _vocabulary(about: Mapping[str, Any]) -> Any:
    model = about.get("model")
    return model.get("vocab_size") if isinstance(model, dict) else None


def extra_states(model: ModelConfig, modules: Sequence[str] = LINEAR) -> list[str]:
    """Names of what Megatron's linear layers, ``modules`` of each layer and the head, say beside their weights: nothing, for the
    sake of Transformer Engine, which keeps the scales of its 8-bit types there."""
    layers = (f"{part}_block.layers.{number}" for part, number in (layer.split(".") for layer in Ours.of(model, 1).layers()))
    heads = [] if model.tied_head else ["head"]
    return [f"{module}._extra_state" for module in (*(f"{layer}.{own}" for layer in layers for own in modules), *heads)]


def passed_over(model: ModelConfig) -> set[str]:
    """Names in other people's files that hold nothing of the model."""
    return set(extra_states(model, (*LINEAR, ENGINE)))
