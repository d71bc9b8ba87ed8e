"""What one learned tensor is: its shape, how it starts and what kind it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from loopscale.config.tree import ModelConfig

Init = Literal[
    "zeros", "ones", "two", "identity", "decay", "decay_half_log_five", "linear", "output", "embedding", "head", "uniform"
]
Kind = Literal["matrix", "embedding", "norm", "bias", "injection", "coda_linear", "scalar"]


@dataclass(frozen=True)
class Weight:
    """One tensor under its global name. ``kind`` decides whether it decays and which optimizer steps it;
    ``tensor_axis`` is the axis that tensor parallelism divides."""

    name: str
    shape: tuple[int, ...]
    init: Init
    kind: Kind
    tensor_axis: int | None = None


class PartWeight(NamedTuple):
    """A parameter of an injection or a readout: the attribute that holds it is its name."""

    name: str
    shape: tuple[int, ...]
    init: Init
    kind: Kind


def norm_gain(model: ModelConfig) -> Init:
    """How a norm's gain of 1 is stored at first."""
    return "zeros" if model.norm_centered else "ones"
