"""The tables below a study's figures: results over seeds, what each arm changes, its runs, their environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from loopscale.report.sections import pairs, section, table
from loopscale.report.statistics import Estimate, estimate, paired_difference
from loopscale.report.study import Arm, Member, Pick, StudyResults, law_at, law_entropy, law_mean
from loopscale.report.study_figures import final_perplexities
from loopscale.report.study_findings import measured

OVER_SEEDS = "mean ± standard error over seeds (one seed alone has none)"


def sections(study: StudyResults) -> Iterator[str]:
    """The sections as HTML, in their order on the page."""
    yield section(f"Held-out perplexity at the end, {OVER_SEEDS}", _perplexities(study), wide=True)
    if len(study.arms) > 1:
        title = f"Held-out loss at the end minus that of {study.reference.name}, in nats, paired by seed: {OVER_SEEDS}"
        yield section(title, _differences(study), wide=True)
    yield section(f"Law at the end, {OVER_SEEDS}", _laws(study), wide=True)
    yield section("What each arm changes", _changes(study), wide=True)
    yield section("Runs", _runs(study), wide=True)
    yield section("Environment of the finished runs", pairs(_environment(study)), wide=True)


def _perplexities(study: StudyResults) -> str:
    return _by_depth(study, study.arms, final_perplexities)


def _differences(study: StudyResults) -> str:
    reference = study.reference

    def difference(arm: Arm, depth: int) -> Estimate | None:
        return paired_difference(arm.losses(depth), reference.losses(depth))

    return _by_depth(study, study.arms[1:], difference, signed=True)


def _by_depth(study: StudyResults, arms: tuple[Arm, ...], of: Callable[[Arm, int], Estimate | None], signed: bool = False) -> str:
    """A row for each arm and a column for each validated depth."""
    depths = sorted({depth for arm in study.arms for depth in arm.depths})
    rows = []
    for arm in arms:
        found = [of(arm, depth) for depth in depths]
        seeds = max((each.n for each in found if each), default=0)
        rows.append([arm.name, seeds, *(_cell(each, seeds, signed) for each in found)])
    return table(("arm", "seeds", *(f"depth {depth}" for depth in depths)), rows) if depths else ""


def _cell(value: Estimate | None, seeds: int, signed: bool = False) -> str:
    """An estimate, and its seeds where they are not those of its row: a loss was not finite."""
    if value is None:
        return "–"
    text = measured(value, signed)
    return text if value.n == seeds else f"{text} ({value.n} seed{'s' * (value.n > 1)})"


def _laws(study: StudyResults) -> str:
    rows = [row for arm in study.arms if (row := _law(arm))]
    return table(("arm", "seeds", "mean", "entropy, nats", "probability of the evaluation depth"), rows)


def _law(arm: Arm) -> list[Any]:
    picks: tuple[Pick, ...] = (law_mean, law_entropy, lambda record: law_at(record, arm.depth))
    found = [estimate(arm.final(pick).values()) for pick in picks]
    seeds = max((each.n for each in found if each), default=0)
    mean, entropy, probability = (_cell(each, seeds) for each in found)
    return [arm.name, seeds, mean, entropy, f"p({arm.depth}) = {probability}"] if seeds else []


def _changes(study: StudyResults) -> str:
    return table(("arm", "section.key=value"), [[name, "\n".join(set_) or "nothing"] for name, set_ in study.changes.items()])


def _runs(study: StudyResults) -> str:
    rows = [[member.name, member.arm, member.seed, *_course(member)] for member in study.members]
    return table(("run", "arm", "seed", "state", "tokens", "time", "note"), rows)


def _course(member: Member) -> list[str]:
    last = member.run.records[-1] if member.run and member.run.records else {}
    notes = [] if member.finished else ["left out"]
    notes += [f"{name} cannot be read and is left out" for name in (member.run.unreadable if member.run else ())]
    if last.get("skipped"):
        notes.append(f"{last['skipped']} steps skipped")
    tokens = f"{last['tokens']:,}" if last.get("tokens") else ""
    time = str(timedelta(seconds=round(last["elapsed"]))) if last.get("elapsed") is not None else ""
    return [member.state, tokens, time, "; ".join(notes)]


def _environment(study: StudyResults) -> dict[str, Any]:
    """Versions, code, layout and machine; each value that occurs, where the runs differ."""
    found: dict[str, list[str]] = {}
    for run in study.finished:
        git = {key: value for key, value in run.about("git").items() if key != "diff"}
        parts = {"layout": run.about("layout"), "machine": run.about("machine"), "git": git, "version of": run.about("versions")}
        for part, values in parts.items():
            for key, value in values.items():
                known = found.setdefault(f"{part} {key}", [])
                if str(value) not in known:
                    known.append(str(value))
    return {key: ", ".join(values) for key, values in found.items()}
