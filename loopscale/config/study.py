"""A study: arms that differ from one configuration, each with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from loopscale.config.load import Loaded, load
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
    loaded: Loaded[Config]

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"


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
    names = [arm.name for arm in study.arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(str(path), [Problem("arms", f"{twice[0]} is the name of two arms")])
    runs = []
    folder = Path("runs") / path.stem
    for seed in study.seeds:
        for arm in study.arms:
            name = f"{arm.name}-s{seed}"
            own = (f"run.name={name}", f"run.folder={folder}", f"run.seed={seed}")
            loaded = load(Config, path.parent / study.config, [*study.set, *arm.set, *overrides, *own])
            runs.append(StudyRun(arm.name, seed, loaded))
    return Study(path.stem, folder, tuple(runs))
