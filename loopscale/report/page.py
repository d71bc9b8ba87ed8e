"""The report page of a run."""

from __future__ import annotations

from html import escape
from pathlib import Path

from loopscale.report.document import document, write
from loopscale.report.figures import panels, protocol
from loopscale.report.findings import count, number, perplexity
from loopscale.report.run import Run, read_run
from loopscale.report.sections import moment, sections


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run: one file that needs no network.

    Args:
        out: Where to; by default ``report.html`` in the run folder.

    Returns:
        The page's path.

    Raises:
        UsageError: it is no run folder.
    """
    return write(out or run_folder / "report.html", page(read_run(run_folder)))


def page(run: Run) -> str:
    """The whole page."""
    return document(run.name, summary(run), _origin(run), panels(run), sections(run))


def summary(run: Run) -> str:
    """One sentence as HTML: what was trained, how good it is, and by which protocol."""
    sizes = run.about("parameters")
    corpus = run.about("corpus")
    what = f"<b>{escape(run.name)}</b>, a looped language model"
    if sizes.get("total"):
        what += f" of {count(sizes['total'])} parameters"
        if sizes.get("effective") and run.depth:
            what += f" ({count(sizes['effective'])} effective at depth {run.depth})"
    last = run.records[-1] if run.records else {}
    trained = f"trained for {last['step']:,} steps" if last else "not trained yet"
    if tokens := last.get("tokens"):
        epochs = f" ({tokens / corpus['train_tokens']:.2g} epochs)" if corpus.get("train_tokens") else ""
        trained += f" on {count(tokens)} tokens{epochs}"
    if last and corpus.get("path"):
        trained += f" of {escape(str(corpus['path']))}"
    return f"{what}, {trained}, {_quality(run)}."


def _quality(run: Run) -> str:
    """How good it is, from the best source there is: an evaluation, else a validation, else the training loss."""
    evaluation = run.evaluation
    scores = dict(zip(evaluation["depths"], evaluation["perplexity"], strict=True)) if evaluation else {}
    finite = {depth: value for depth, value in scores.items() if value is not None}
    if evaluation and finite:
        depth = run.depth if run.depth in finite else min(finite, key=lambda each: finite[each])
        baselines = evaluation.get("baselines") or {}
        against = ", ".join(f"{escape(name)} {number(perplexity(nats))}" for name, nats in baselines.items() if nats is not None)
        reaches = f"reaches <b>perplexity {number(finite[depth])} at depth {depth}</b>" + (f" ({against})" if against else "")
        return f'{reaches} <span class="protocol">({escape(protocol(evaluation))})</span>'
    depth = run.validation_depth()
    validated = [record for record in run.records if (record.get("validation") or {}).get(str(depth)) is not None]
    if validated:
        value = number(perplexity(validated[-1]["validation"][depth]))
        return f"had <b>perplexity {value} at depth {depth}</b> at its last validation, step {validated[-1]['step']:,}"
    losses = [record["loss"] for record in run.records if record.get("loss") is not None]
    if losses:
        return f"has not been evaluated; its last training loss is <b>{number(losses[-1])} nats per token</b>"
    return "has no result yet"


def _origin(run: Run) -> str:
    """When, from which code and how it ran, in one line."""
    manifest = run.manifest
    git, layout = run.about("git"), run.about("layout")
    revision = ""
    if git.get("revision"):
        revision = f"revision {str(git['revision'])[:9]}{' with uncommitted changes' if git.get('dirty') else ''}"
    seed = f"seed {manifest['seed']}" if "seed" in manifest else ""
    parts = [moment(manifest.get("created")), seed, revision, ", ".join(f"{key} {value}" for key, value in layout.items())]
    return " · ".join(part for part in parts if part)
