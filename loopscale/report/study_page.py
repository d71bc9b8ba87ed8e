"""The report page of a study."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loopscale.report.document import document, write
from loopscale.report.findings import span
from loopscale.report.sections import moment
from loopscale.report.study import Arm, StudyResults, read_study
from loopscale.report.study_figures import final_perplexities, panels
from loopscale.report.study_findings import measured
from loopscale.report.study_tables import sections


def write_study_report(path: Path, overrides: Sequence[str] = (), out: Path | None = None) -> tuple[Path, str]:
    """Write the page of the study in ``path``: one file that needs no network.

    Args:
        overrides: `section.key=value`, as its runs were trained with.
        out: Where to; by default ``report.html`` in the study's folder.

    Returns:
        The page's path, and a sentence about runs that are left out, empty if none is.

    Raises:
        ConfigError: the study's file or a run's configuration is wrong.
        UsageError: no run has finished.
    """
    study = read_study(path, overrides)
    return write(out or study.folder / "report.html", page(study)), left_out(study)


def page(study: StudyResults) -> str:
    """The whole page."""
    return document(study.name, summary(study), _origin(study), panels(study), sections(study))


def summary(study: StudyResults) -> str:
    """What was compared and what came of it, by which protocol, and what is left out; as HTML."""
    names = ", ".join(dict.fromkeys(member.arm for member in study.members))
    seeds = list(dict.fromkeys(member.seed for member in study.members))
    arms = len(study.changes)
    compared = (
        f"{arms} arm{'s' * (arms != 1)} ({names}) with {len(seeds)} seed{'s' * (len(seeds) != 1)} each"
        f" ({', '.join(map(str, seeds))}): looped language models{_size(study)}, trained for"
        f" {span([arm.config.train.steps for arm in study.arms], '{:,}'.format)} steps{_tokens(study)} of {_corpora(study)}"
    )
    results = "; ".join(filter(None, map(_result, study.arms)))
    text = f"<b>{escape(study.name)}</b> compares {escape(compared)}."
    if results:
        text += f' {results} <span class="protocol">({escape(_protocol(study))})</span>.'
    missing = left_out(study)
    return f"{text} <b>{escape(missing)}</b>" if missing else text


def left_out(study: StudyResults) -> str:
    """A sentence about the runs that are not finished; empty if all are."""
    if not study.left_out:
        return ""
    runs = ", ".join(f"{member.name} ({member.state})" for member in study.left_out)
    return f"Left out: {len(study.left_out)} of {len(study.members)} runs, which are not finished: {runs}."


def _result(arm: Arm) -> str:
    found = final_perplexities(arm, arm.depth)
    if found is None:
        return f"{escape(arm.name)} has no finite held-out loss at the end" if arm.depths else ""
    return f"{escape(arm.name)} reaches <b>perplexity {measured(found)} at depth {arm.depth}</b>"


def _protocol(study: StudyResults) -> str:
    """How perplexity was measured."""
    config = study.reference.config
    depths = sorted({depth for arm in study.arms for depth in arm.depths})
    seeds = sorted({len(arm.runs) for arm in study.arms})
    error = "± standard error over seeds" if seeds[-1] > 1 else "one seed each: no error"
    if seeds[0] == 1 < seeds[-1]:
        error += ", none where there is one"
    return (
        f"exp of the held-out loss in nats per token after the last step, up to {config.validation.sequences:,} sequences of"
        f" {config.corpus.sequence_length:,} tokens, validated at depths {', '.join(map(str, depths))}; {error}"
    )


def _size(study: StudyResults) -> str:
    totals = [total for run in study.finished if (total := run.about("parameters").get("total"))]
    return f" of {span(totals)} parameters" if totals else ""


def _tokens(study: StudyResults) -> str:
    tokens = [value for run in study.finished if (value := run.records[-1].get("tokens"))]
    return f" on {span(tokens)} tokens" if tokens else ""


def _corpora(study: StudyResults) -> str:
    paths = [str(run.about("corpus").get("path") or "") for run in study.finished]
    return ", ".join(dict.fromkeys(path for path in paths if path)) or str(study.reference.config.corpus.path)


def _origin(study: StudyResults) -> str:
    """Where it comes from and when its runs began, in one line."""
    created = sorted(str(run.manifest["created"]) for run in study.finished if run.manifest.get("created"))
    begun = " to ".join(dict.fromkeys(moment(time) for time in (created[:1] + created[-1:])))
    revisions = dict.fromkeys(str(run.about("git")["revision"])[:9] for run in study.finished if run.about("git").get("revision"))
    code = f"revision {', '.join(revisions)}" if revisions else ""
    return " · ".join(filter(None, (f"study over {study.base}", f"runs begun {begun}" if begun else "", code)))
