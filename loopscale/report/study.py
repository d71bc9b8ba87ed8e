"""Reading the runs of a study: what each arm's finished seeds recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopscale.config.load import from_values, load
from loopscale.config.study import StudyConfig, StudyRun, load_study
from loopscale.config.tree import Config
from loopscale.errors import LoopscaleError, UsageError
from loopscale.report.run import Entry, Run, read_run
from loopscale.report.statistics import Estimate, estimate, mean_law

Pick = Callable[[Entry], float | None]
"""One value of a record."""


@dataclass(frozen=True)
class Member:
    """One run of the study, as its file says, and what its folder holds."""

    arm: str
    seed: int
    name: str
    config: Config
    run: Run | None
    """None when it has not begun."""
    differences: tuple[str, ...] = ()
    """Between what was trained and what the study's file gives now."""

    @property
    def finished(self) -> bool:
        return not self.differences and self._step() == self.config.train.steps

    @property
    def state(self) -> str:
        if self.run is None:
            return "missing"
        if self.differences:
            return f"trained with {'; '.join(self.differences[:3])}"
        return "finished" if self.finished else f"step {self._step():,} of {self.config.train.steps:,}"

    def _step(self) -> int:
        return self.run.records[-1]["step"] if self.run and self.run.records else 0


@dataclass(frozen=True)
class Arm:
    """The finished runs of one arm, by seed."""

    name: str
    config: Config
    """Of its first seed."""
    runs: dict[int, Run]

    @property
    def depth(self) -> int:
        """The depth that it is quoted at: the mean that it was trained for, or what was validated nearest to it."""
        wanted = self.config.depth.evaluation_depth
        return min(self.depths, key=lambda depth: (abs(depth - wanted), depth), default=wanted)

    @property
    def depths(self) -> list[int]:
        """Depths validated at the end."""
        return sorted({int(depth) for run in self.runs.values() for depth in run.records[-1].get("validation") or {}})

    def losses(self, depth: int) -> dict[int, float | None]:
        """Held-out loss at the end, in nats per token, by seed."""
        return self.final(lambda record: validation_loss(record, depth))

    def final(self, pick: Pick) -> dict[int, float | None]:
        """A value of the last record, by seed."""
        return {seed: pick(run.records[-1]) for seed, run in self.runs.items()}

    def curve(self, pick: Pick) -> dict[int, Estimate]:
        """A value over the seeds by step, at steps where each of them has it: else the curve would jump with who is in it."""
        seeds = [{record["step"]: pick(record) for record in run.records} for run in self.runs.values()]
        steps = sorted(set.intersection(*({step for step, value in each.items() if value is not None} for each in seeds)))
        return {step: found for step in steps if (found := estimate(each[step] for each in seeds))}

    def laws(self) -> dict[int, list[float]]:
        """The prior's law, averaged over the seeds, by step: the probabilities of R = 1, 2, …"""
        seeds = [{record["step"]: law(record) for record in run.records} for run in self.runs.values()]
        steps = sorted(set.intersection(*({step for step, value in each.items() if value} for each in seeds)))
        return {step: mean_law([each[step] for each in seeds]) for step in steps}


@dataclass(frozen=True)
class StudyResults:
    """All runs of a study, and the finished ones by arm."""

    name: str
    folder: Path
    base: str
    """The configuration that all arms begin with."""
    changes: dict[str, tuple[str, ...]]
    """What each arm of the file differs in, as `section.key=value`."""
    members: tuple[Member, ...]
    arms: tuple[Arm, ...]
    """Those with a finished run, in the order of the file."""

    @property
    def reference(self) -> Arm:
        """The arm with which the others are compared: the first of the file that has finished runs."""
        return self.arms[0]

    @property
    def has_laws(self) -> bool:
        """Whether depths are drawn in one of the arms: else there is no law to show."""
        return any(arm.config.depth.prior != "fixed" for arm in self.arms)

    @property
    def left_out(self) -> list[Member]:
        return [member for member in self.members if not member.finished]

    @property
    def finished(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs.values()]


def read_study(path: Path, overrides: Sequence[str] = ()) -> StudyResults:
    """Read the runs of the study in ``path``, ``overrides`` as they were trained with.

    Raises:
        ConfigError: the study's file or a run's configuration is wrong.
        UsageError: no run has finished.
    """
    study = load_study(path, overrides)
    given = load(StudyConfig, path).config
    members = tuple(_member(study.folder, run) for run in study.runs)
    arms = []
    for arm in given.arms:
        own = [member for member in members if member.arm == arm.name]
        runs = {member.seed: member.run for member in own if member.finished and member.run}
        if runs:
            arms.append(Arm(arm.name, own[0].config, runs))
    if not arms:
        raise UsageError(
            f"no run of the study {path} has finished in {study.folder}: `loopscale train --study {path}` makes them"
        )
    changes = {arm.name: arm.set for arm in given.arms}
    return StudyResults(study.name, study.folder, given.config, changes, members, tuple(arms))


def _member(folder: Path, run: StudyRun) -> Member:
    known = (run.arm, run.seed, run.name, run.loaded.config)
    if not (folder / run.name / "metrics.jsonl").is_file():
        return Member(*known, None)
    begun = read_run(folder / run.name)
    return Member(*known, begun, _differences(run, begun.config))


def _differences(run: StudyRun, trained: Entry) -> tuple[str, ...]:
    """Of a run whose configuration is still there; what an older version did not write has its default."""
    if not trained:
        return ()
    try:
        return tuple(run.differences(from_values(Config, trained).config.model_dump(mode="json")))
    except LoopscaleError:
        return ("a configuration that this version does not read",)


# --- values of a record ----------------------------------------------------------------------------------------------


def validation_loss(record: Entry, depth: int) -> float | None:
    """Held-out loss at a depth, in nats per token."""
    value: float | None = (record.get("validation") or {}).get(str(depth))
    return value


def law(record: Entry) -> list[float]:
    """Probabilities of R = 1, 2, … in the next step's draw; empty in the records of older runs."""
    probabilities: list[float] = (record.get("prior") or {}).get("probabilities") or []
    return [] if None in probabilities else probabilities


def law_mean(record: Entry) -> float | None:
    value: float | None = (record.get("prior") or {}).get("mean")
    return value


def law_entropy(record: Entry) -> float | None:
    """In nats."""
    value: float | None = (record.get("prior") or {}).get("entropy")
    return value


def law_at(record: Entry, depth: int) -> float | None:
    """The law's probability of one depth."""
    probabilities = law(record)
    if not probabilities:
        return None
    return probabilities[depth - 1] if depth <= len(probabilities) else 0.0


def final_rms(record: Entry, width: int) -> float | None:
    """Root mean square of the state after the last loop, from its L2 norm over the width."""
    norms = record.get("state_norm") or [None]
    return None if norms[-1] is None else norms[-1] / math.sqrt(width)
