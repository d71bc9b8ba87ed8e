#!/usr/bin/env python
"""How far gradients of the shared block under bf16 visits are from those in fp32, by the number of visits R.

Two ways to add up the contributions of R visits and a few microbatches to a weight's gradient, from the same bf16 visits:
ours, in fp32, and in a bf16 buffer, as a model that is cast to bf16 as a whole does it. Errors are ‖found − exact‖ / ‖exact‖
over all weights of the core, the mean of several seeds.

    python tools/study_bf16.py [--visits 1 4 16 32] [--microbatches 4] [--width 64] [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from loopscale.config.tree import ModelConfig, ParallelConfig
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import Exit
from loopscale.parallel import mesh as meshes
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.plan import plan

LENGTH, BATCH, VOCABULARY = 32, 4, 256


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visits", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    meshes.start(ParallelConfig())
    print(f"{'R':>4} {'fp32 sums (ours)':>18} {'bf16 sums':>12}")
    for visits in options.visits:
        found = [errors(visits, options.microbatches, options.width, seed) for seed in range(options.seeds)]
        ours, plain = (statistics.mean(values) for values in zip(*found, strict=True))
        print(f"{visits:>4} {ours:>18.4f} {plain:>12.4f}")


def errors(visits: int, microbatches: int, width: int, seed: int) -> tuple[float, float]:
    """Relative error of the core's gradient with fp32 sums, and with bf16 sums, at one seed."""
    exact, _ = gradients(visits, microbatches, width, seed, torch.float32)
    ours, plain = gradients(visits, microbatches, width, seed, torch.bfloat16)
    return float((ours - exact).norm() / exact.norm()), float((plain - exact).norm() / exact.norm())


def gradients(visits: int, microbatches: int, width: int, seed: int, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """The core's gradient as it arrives in the parameters, and as a bf16 buffer would have collected it."""
    model = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        heads=4,
        ffn_size=2 * width,
    )
    stage = LoopedStage(model, LENGTH, seed=seed, compute=compute)
    core = list(stage.core_block.parameters())
    sums = [torch.zeros_like(p, dtype=torch.bfloat16) for p in core]
    for parameter, total in zip(core, sums, strict=True):
        parameter.register_hook(adding_to(total))
    tokens = torch.randint(VOCABULARY, (microbatches, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    documents, numbers = Documents.whole(BATCH, LENGTH, torch.device("cpu")), torch.arange(microbatches * BATCH)
    tasks = [
        Task(
            Inputs(own[:, :-1], own[:, 1:].contiguous(), documents, samples, final_visit=visits),
            visits, visits, (Exit(visits, (visits,)),), 1 / tokens[..., 1:].numel(),
        )
        for own, samples in zip(tokens, numbers.split(BATCH), strict=True)
    ]  # fmt: skip
    execute(plan(1, [t.work for t in tasks], in_flight=1), stage, tasks, Links.alone())
    return _flat(p.grad for p in core if p.grad is not None), _flat(total.float() for total in sums)


def adding_to(total: Tensor) -> Callable[[Tensor], None]:
    def add(contribution: Tensor) -> None:
        total.add_(contribution.to(torch.bfloat16))

    return add


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


if __name__ == "__main__":
    main()
