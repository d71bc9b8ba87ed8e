"""What is kept of a step that was skipped: enough to find the samples, look at them, and run the step again.

RUN/skipped/step-N.json holds

    step, reason, loss, depths      steps are counted from 1; the depths that were drawn, by group or by sequence
    samples                         [first, end) of the step's global samples
    first_bad                       where it began: one of ``bad``, with its rank and stage; null for a loss spike
    ranks                           for each rank: rank, stage, and
        bad                         all that it met and was not finite: terms of the loss with their samples and tokens,
                                    microbatch after microbatch, then gradients in the order of the weights table
        microbatches                on ranks that read data: group, depth, samples, terms (they add up to the objective)

Numbers that are not finite are null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopscale.durable import write_json
from loopscale.model.inputs import Inputs
from loopscale.model.weights import Holder
from loopscale.parallel.mesh import Mesh
from loopscale.parallel.ring.execute import Outcome, Task

Entry = dict[str, Any]


@dataclass(frozen=True)
class Skipped:
    """What the file says, see above."""

    step: int
    reason: str
    loss: float | None
    depths: tuple[int, ...]
    samples: tuple[int, int]
    ranks: list[Entry]


def describe_rank(
    mesh: Mesh,
    microbatches_per_group: int,
    tasks: Sequence[Task[Inputs]],
    outcomes: Sequence[Outcome],
    trained: Iterable[tuple[Holder, nn.Parameter]],
) -> Entry:
    """This rank's entry in ``ranks``. Slow: it looks at every gradient by itself."""
    microbatches = [
        {
            "microbatch": i,
            "group": i // microbatches_per_group,
            "depth": task.depth,
            "samples": task.inputs.samples.tolist(),
            "terms": {name: _finite(float(term) / mesh.data_size) for name, term in outcome.terms.items()},
        }
        for i, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True))
        if mesh.reads
    ]
    bad = [*_bad_terms(microbatches, tasks), *_bad_gradients(trained, mesh)]
    return {"rank": mesh.rank, "stage": mesh.stage, "bad": bad, "microbatches": microbatches}


def _bad_terms(microbatches: Iterable[Entry], tasks: Sequence[Task[Inputs]]) -> Iterator[Entry]:
    """Terms of the loss that are not finite, with the tokens they are of."""
    for entry in microbatches:
        number = entry["microbatch"]
        for name in (n for n, term in entry["terms"].items() if term is None):
            about = {"microbatch": number, "samples": entry["samples"], "tokens": tasks[number].inputs.tokens.tolist()}
            yield {"tensor": f"{name} of microbatch {number}", **about}


def _bad_gradients(trained: Iterable[tuple[Holder, nn.Parameter]], mesh: Mesh) -> Iterator[Entry]:
    """Gradients whose norm is not finite, by global names."""
    for holder, parameter in trained:
        if parameter.grad is None or _is_finite(parameter.grad):
            continue
        bad = dict.fromkeys((w.name for w in holder.weights), 0)  # entries that are not finite
        for box, here in holder.views(parameter.grad.contiguous(), mesh.tensor_rank, mesh.tensor_size):
            bad[box.weight.name] += int((~torch.isfinite(here)).sum())
        # Large finite numbers may overflow only in the norm of all of them.
        for name in [n for n, entries in bad.items() if entries] or bad:
            yield {"tensor": f"gradient of {name}", "entries": bad[name]}


def first_bad(ranks: Sequence[Entry]) -> Entry | None:
    """Where a step went wrong first: a term of the loss rather than a gradient, which follows; then the lowest rank."""
    found = [{**bad, "rank": rank["rank"], "stage": rank["stage"]} for rank in ranks for bad in rank["bad"][:1]]
    return min(found, key=lambda bad: ("microbatch" not in bad, bad["rank"]), default=None)


def in_words(bad: Entry) -> str:
    """ "cross_entropy of microbatch 1 (global samples 12 to 15) on rank 1, stage 0"."""
    samples = bad.get("samples")
    which = f" (global samples {samples[0]} to {samples[-1]})" if samples else ""
    return f"{bad['tensor']}{which} on rank {bad['rank']}, stage {bad['stage']}"


def path_of(folder: Path, step: int) -> Path:
    """The file about step ``step`` of the run in ``folder``."""
    return folder / "skipped" / f"step-{step}.json"


def keep(path: Path, skipped: Skipped) -> None:
    """Writes the file."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, {**asdict(skipped), "first_bad": first_bad(skipped.ranks)})


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
