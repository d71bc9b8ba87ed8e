"""A plain model made into a looped one: some of its layers become the prelude, some the core, some the coda; others are left out.

As in *Retrofitted recurrence* (arXiv 2511.07384), by default the last layers before the coda are looped and those between prelude
and core left out. The loop begins like the stack of layers that it is made of: the state starts as the prelude's output e, and
the injection hands e itself to the first visit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscale.config import Config, from_values
from loopscale.convert.compare import Read
from loopscale.convert.formats.base import Need, unmet
from loopscale.convert.mapping import Ours, Rule
from loopscale.errors import CheckpointError, UsageError
from loopscale.model.weights import initial

PARTS = ("prelude", "core", "coda")
REPEATING = ("none", "huginn_linear")
"""Injections whose every visit begins where the last one ended, at first."""
INJECTIONS = (*REPEATING, "add", "diagonal", "ortho")
"""Those that can hand e to the first visit."""
PLAIN = (
    Need("depth.deepest", (1,)),
    Need("model.inject", ("none",)),
    Need("model.prelude_layers", (0,)),
    Need("model.coda_layers", (0,)),
    Need("model.between", ("none",)),
    Need("model.readout", ("rmsnorm", "raw", "alpha")),
    Need("model.coda_linear", (False,)),
    Need("model.value_embeddings", (False,)),
)
"""Of a plain model, whose layers do the same wherever they are."""
DEEPEST = 256
"""Mean that may be asked for."""
CURRICULUM = 1.1
"""Mean number of visits to begin with: nearly the plain model."""
RATE = 3e-4
"""Learning rate to go on with: below that of weights that have learned nothing."""


@dataclass(frozen=True)
class Plan:
    """Which layers go where, by their numbers in the plain model, and how they are looped."""

    layers: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Of prelude, core and coda."""
    depth: int
    """Mean number of visits to train with."""
    inject: str

    def stack(self, visits: int) -> tuple[int, ...]:
        """The layers that a forward of so many visits goes through."""
        prelude, core, coda = self.layers
        return prelude + core * visits + coda

    @property
    def compared(self) -> int:
        """Visits whose states are those of the plain stack of layers, at first."""
        return min(self.depth, 2) if self.inject in REPEATING else 1


def plan(text: str, depth: int, inject: str, layers: int) -> Plan:
    """Of ``text`` as a user writes it, for a model of so many layers: the numbers of layers of prelude, core and coda, as 4/8/4,
    or which layers they are, as 0-3/18-25/26-29. Raises :class:`UsageError` for any other."""
    if depth > DEEPEST:
        raise UsageError(f"--depth is {depth}, must be at most {DEEPEST}")
    found = re.fullmatch(r"([0-9]+)/([0-9]+)/([0-9]+)", text)
    if found:
        p, r, c = map(int, found.groups())
        if not r or p + r + c > layers:
            raise UsageError(f"--retrofit is {text}; the core needs a layer, and the model has {layers} for all three")
        chosen = tuple(range(p)), tuple(range(layers - r - c, layers - c)), tuple(range(layers - c, layers))
        return Plan(chosen, depth, inject)
    if not re.fullmatch(r"(?:[0-9]+-[0-9]+)?/[0-9]+-[0-9]+/(?:[0-9]+-[0-9]+)?", text):
        raise UsageError(f"--retrofit is {text!r}, must be numbers of layers as 4/8/4, or layers as 0-3/18-25/26-29")
    ends = [tuple(map(int, part.split("-"))) if part else (0, -1) for part in text.split("/")]
    for first, last in ends:
        if first > last >= 0 or last >= layers:
            raise UsageError(f"--retrofit is {text}: there are no layers {first}-{last}; the model has layers 0-{layers - 1}")
    prelude, core, coda = (tuple(range(first, last + 1)) for first, last in ends)
    return Plan((prelude, core, coda), depth, inject)


def refuse_looped(config: Config) -> None:
    """Raises :class:`CheckpointError` for a model that is not a plain one."""
    if (wrong := unmet(config, PLAIN)) is not None:
        raise CheckpointError(f"--retrofit makes a looped model of a plain one, and of this one {wrong}")


def looped(config: Config, plan: Plan) -> Config:
    """The configuration of the looped model that is made of a plain one's."""
    fixed = {"prior": "fixed", "mean": 1, "backprop": None}
    drawn = {"prior": "pln", "mean": plan.depth, "cap": max(64, 4 * plan.depth), "curriculum": CURRICULUM}
    drawn |= {"backprop": None} if plan.inject == "none" else {}
    values = config.model_dump()
    values["model"] |= {f"{part}_layers": len(own) for part, own in zip(PARTS, plan.layers, strict=True)}
    values["model"] |= {"inject": plan.inject, "state_init": "zero" if plan.inject == "add" else "embedding"}
    values["depth"] = fixed if plan.depth == 1 else drawn
    values["optimizer"] |= {"lr": RATE}
    return from_values(Config, values, "--retrofit").config


def looped_rules(plain: Sequence[Rule], config: Config, plan: Plan) -> list[Rule]:
    """Rules of the looped model ``config``, of those of the plain one. A layer has a rule for each place that it goes to."""
    ours = Ours.of(config.model, config.corpus.sequence_length)
    places = defaultdict[str, list[str]](list)
    for part, own in zip(PARTS, plan.layers, strict=True):
        for i, layer in enumerate(own):
            places[f"core.{layer}."].append(f"{part}.{i}.")

    def placed(rule: Rule, old: str, new: str) -> Rule:
        names = (part.weight.name.replace(old, new, 1) for part in rule.parts)
        return replace(rule, parts=tuple(replace(p, weight=ours.weights[n]) for p, n in zip(rule.parts, names, strict=True)))

    found = []
    for rule in plain:
        of = re.match(r"core\.\d+\.", rule.parts[0].weight.name)
        found += [placed(rule, of[0], place) for place in places[of[0]]] if of else [rule]
    return found


def injection(config: Config) -> dict[str, Tensor]:
    """Weights of the injection by global name, with which the first visit begins at e where the state does: h + 0 e
    (`huginn_linear`), a h + (1 - a) e (`diagonal`), e and what of a h is orthogonal to it (`ortho`)."""
    model = config.model
    ours, identity = Ours.of(model, config.corpus.sequence_length), torch.eye(model.hidden_size)
    found = {name: initial(weight, model, config.run.seed) for name, weight in ours.weights.items() if name.startswith("inject.")}
    if model.inject == "huginn_linear":
        found["inject.weight"] = torch.cat([identity, torch.zeros_like(identity)], 1)
    elif model.inject in ("diagonal", "ortho"):
        step = F.softplus(found["inject.dt_bias"])
        decay = torch.exp(-step * found["inject.A_log"].exp()) if model.inject == "diagonal" else torch.zeros(())
        found["inject.weight"] = identity * ((1 - decay) / step).unsqueeze(1)
    return found


def stacked(plain: Config, read: Read, layers: Sequence[int]) -> tuple[Config, Read]:
    """The plain model that has these ``layers`` of another, by number, one after the other: its configuration and weights."""
    model = plain.model.model_copy(update={"core_layers": len(layers)})

    def restacked(names: Sequence[str]) -> dict[str, Tensor]:
        given = {n: re.sub(r"^core\.(\d+)", lambda layer: f"core.{layers[int(layer[1])]}", n) for n in names}
        found = read(list(given.values()))
        return {n: found[theirs] for n, theirs in given.items()}

    return plain.model_copy(update={"model": model}), restacked
