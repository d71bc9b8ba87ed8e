"""A study: arms that differ from one configuration, each with several seeds."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from loopscale.config.load import Loaded, load
from loopscale.config.show import QUIET, differences
from loopscale.config.tree import Config, NonNegativeInt, Section
from loopscale.errors import ConfigError, Problem

Overrides = Annotated[tuple[str, ...], Field(strict=False)]


class ArmConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Of its runs: NAME-sSEED."""
    set: Overrides = ()
    """What differs, as `section.key=value`."""


class StudyConfig(Section):
    """Arms that are compared, and the seeds of each."""

    config: str
    """The run that all arms begin with, relative to this file."""
    set: Overrides = ()
    """What differs from it in all arms, as `section.key=value`."""
    arms: Annotated[tuple[ArmConfig, ...], Field(strict=False, min_length=1)]
    """What is compared."""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] = (1,)
    """Seeds, each run by every arm."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    arm: str
    seed: int
    base: Path
    overrides: tuple[str, ...]
    """With ``base`` what `loopscale train` is given for it."""
    loaded: Loaded[Config]

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    def differences(self, trained: Mapping[str, Any]) -> list[str]:
        """How a configuration that was trained, as plain values, differs from this run's in what makes a run."""
        found = differences(trained, self.loaded.config.model_dump(mode="json"))
        settled = {"model.vocab_size"} if self.loaded.config.model.vocab_size is None else set()  # by the corpus, at its start
        return [f"{key} {old}, not {new}" for key, old, new in found if not key.startswith(QUIET) and key not in settled]


@dataclass(frozen=True)
class Study:
    """A study as its file says; ``folder`` is where its runs lie."""

    name: str
    folder: Path
    runs: tuple[StudyRun, ...]


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Reads a study and every run of it, ``overrides`` last; a seed's runs come together. Raises :class:`ConfigError` with the
    problems of the first arm that has any."""
    study = load(StudyConfig, path).config
    names = [f"{arm.name}-s{seed}" for seed in study.seeds for arm in study.arms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(str(path), [Problem("arms", f"two runs are called {twice[0]}: an arm or a seed stands there twice")])
    given = [*study.set, *overrides, *(o for arm in study.arms for o in arm.set)]
    if fixed := [o for o in given if o.startswith(("run.name=", "run.seed="))]:
        raise ConfigError(str(path), [Problem(fixed[0].partition("=")[0], "is the study's to give, by its arms and seeds")])
    if any(o.startswith("run.folder=") for arm in study.arms for o in arm.set):
        raise ConfigError(str(path), [Problem("run.folder", "is one for all arms; give it in the study's own set")])
    base = Path(os.path.normpath(path.parent / study.config))
    folder = Path(load(Config, base, [*study.set, *overrides]).config.run.folder) / path.stem
    runs = []
    for seed, arm in itertools.product(study.seeds, study.arms):
        own = (*study.set, *arm.set, *overrides, *_place(folder, arm, seed))
        runs.append(StudyRun(arm.name, seed, base, own, _load(path, base, arm, own)))
    return Study(path.stem, folder, tuple(runs))


def _place(folder: Path, arm: ArmConfig, seed: int) -> list[str]:
    return [f"run.folder={json.dumps(str(folder))}", f"run.name={arm.name}-s{seed}", f"run.seed={seed}"]


def _load(study: Path, base: Path, arm: ArmConfig, overrides: Sequence[str]) -> Loaded[Config]:
    try:
        return load(Config, base, overrides)
    except ConfigError as error:
        raise ConfigError(f"{study}, arm {arm.name}", error.problems) from None
