"""The tables below a study's figures: results over seeds, what each arm changes, its runs, their environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from loopscale.report import study_scale as scale
from loopscale.report.sections import pairs, section, table
from loopscale.report.statistics import Estimate, estimate, paired_difference
from loopscale.report.study import Arm, Member, Pick, StudyResults, law_at, law_entropy, law_mean
from loopscale.report.study_exits import Way, of_the_end, ways
from loopscale.report.study_figures import final_perplexities
from loopscale.report.study_findings import CLAMPS, measured

OVER_SEEDS = "mean ± standard error over seeds (one seed alone has none)"


def sections(study: StudyResults) -> Iterator[str]:
    """The sections as HTML, in their order on the page."""
    yield section(f"Held-out perplexity at the end, {OVER_SEEDS}", _perplexities(study), wide=True)
    if len(study.arms) > 1:
        title = f"Held-out loss at the end minus that of {study.reference.name}, in nats, paired by seed: {OVER_SEEDS}"
        yield section(title, _differences(study), wide=True)
    if known := _scale(study):
        yield section(f"Scale of the state by the last diagnosis, and what loops gain, {OVER_SEEDS}", known, wide=True)
    if exits := _exits(study):
        yield section(f"Early exits, {OVER_SEEDS}", exits, wide=True)
    if study.has_laws:
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


def _scale(study: StudyResults) -> str:
    """A row for each arm, of what is known; nothing where no run was diagnosed and none has an evaluation of exits."""
    if not any(of_the_end(run) or scale.diagnoses(run) for run in study.finished):
        return ""
    columns: dict[str, Callable[[Arm], scale.Values]] = {
        "norm": lambda arm: scale.last(arm, scale.norm),
        "norm / at the first diagnosis": scale.growths,
        "p99 / median": lambda arm: scale.last(arm, scale.tail),
        "radial part, last loop": lambda arm: scale.last(arm, scale.last_radial_fraction),
        **{f"Δ loss, {words}": partial(scale.last, look=scale.clamp_change(kind)) for kind, words in CLAMPS.items()},
        "ppl@1 − ppl@K": scale.gains,
        "ppl@1 / ppl@K": scale.gaps,
    }
    signed = ("Δ", "ppl@1 −")
    found = [[estimate(of(arm).values()) for of in columns.values()] for arm in study.arms]
    rows = []
    for arm, own in zip(study.arms, found, strict=True):
        seeds = max((each.n for each in own if each), default=0)
        cells = [_cell(each, seeds, name.startswith(signed)) for name, each in zip(columns, own, strict=True)]
        loops = "\n".join(f"{way.rule} {_cell(way.loops, seeds)}" for way in ways(arm) if way.rule)
        rows.append([arm.name, seeds, *cells, loops or "–"])
    head = ("arm", "seeds", *columns, "mean loops")
    known = [index for index in range(len(head)) if index < 2 or any(row[index] != "–" for row in rows)]
    return table([head[index] for index in known], [[row[index] for index in known] for row in rows])


def _exits(study: StudyResults) -> str:
    rows = [
        [arm.name, way.rule, way.loops.n, *map(measured, (way.loops, way.perplexity, way.rate)), _shares(way)]
        for arm in study.arms
        for way in ways(arm)
        if way.rule
    ]
    return table(("arm", "rule", "seeds", "mean loops", "perplexity", "tokens per second", "leaves after loop 1, 2, …"), rows)


def _shares(way: Way) -> str:
    return ", ".join(f"{share:.0%}" for share in way.exits)


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
