#!/usr/bin/env python
"""What diagnosing the loop costs a run: the seconds of one diagnosis as a share of those of the steps between two.

Trains the model of a configuration (by default the demo's) on random tokens, one process, and diagnoses it now and then.

    python tools/bench_diagnostics.py [CONFIG] [section.key=value ...] [--vocabulary 4096 --steps 5 --rounds 3 --threads 1]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from loopscale.config import Config

warnings.filterwarnings("ignore")

DEMO = Path(__file__).parents[1] / "configs" / "run" / "demo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(DEMO))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    for name, default in (("vocabulary", 4096), ("steps", 5), ("rounds", 3), ("threads", torch.get_num_threads())):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    from loopscale.config import Config, load

    config = load(Config, options.config, [f"model.vocab_size={options.vocabulary}", *options.overrides]).config
    train, parts = build(config)
    train()
    for diagnose in parts.values():
        print(diagnose())
    steps, diagnoses = [], {name: [] for name in parts}
    for _ in range(options.rounds):  # by turns: another process may have the machine for a while
        steps += [timed(train) for _ in range(options.steps)]
        for name, diagnose in parts.items():
            diagnoses[name].append(timed(diagnose))
    step, every = statistics.mean(steps), config.diagnostics.every
    means = {name: statistics.mean(seconds) for name, seconds in diagnoses.items()}
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in means.items())
    print(f"a step {step:.3f} s on average; a diagnosis of {config.diagnostics.sequences} sequences: {told}")
    print(f"every {every} steps that is {sum(means.values()) / (every * step):.2%} of the time")


def build(config: Config) -> tuple[Callable[[], object], dict[str, Callable[[], str]]]:
    """What trains a step, and each part of a diagnosis."""
    from loopscale.config import settle
    from loopscale.corpus.batches import Microbatch, StepBatch
    from loopscale.evaluate import equilibrium, scale
    from loopscale.model.flops import count
    from loopscale.model.inputs import Inputs
    from loopscale.model.ring import Ring
    from loopscale.parallel import mesh as meshes
    from loopscale.train.step import TrainStep

    mesh = meshes.start(config.parallel)
    batch = settle(config.batch, config.depth.groups, mesh.data_size)
    length, depth = config.corpus.sequence_length, config.depth.evaluation_depth
    ring = Ring.of(config, count(config.model, length))
    step = TrainStep(config, batch, ring, mesh)
    generator, numbers = torch.Generator().manual_seed(0), itertools.count()  # each step draws its own depths

    def microbatch(first: int, size: int) -> Microbatch:
        tokens = torch.randint(config.model.vocabulary, (size, length + 1), generator=generator)
        boundaries = torch.arange(0, (size + 1) * length, length, dtype=torch.int32)
        return Microbatch(tokens, tokens[:, 1:].contiguous(), boundaries, torch.arange(first, first + size))

    def train() -> object:
        own = [microbatch(m * batch.microbatch, batch.microbatch) for m in range(batch.groups * batch.microbatches_per_group)]
        each = batch.microbatches_per_group
        groups = tuple(tuple(own[g * each : (g + 1) * each]) for g in range(batch.groups))
        return step(next(numbers), StepBatch(groups, 0, batch.global_batch))

    wanted = config.diagnostics.sequences
    inputs = [
        Inputs.of(
            microbatch(i, min(batch.microbatch, wanted - i)), mesh.device, final_visit=depth, purpose="evaluation"
        )
        for i in range(0, wanted, batch.microbatch)
    ]  # fmt: skip
    asked = (step.stage, ring, mesh, config, inputs)
    return train, {
        "equilibrium": lambda: equilibrium.diagnose(*asked).in_words(),
        "scale": lambda: scale.diagnose(*asked).in_words(),
    }


def timed(run: Callable[[], object]) -> float:
    """Seconds; both end in numbers on the CPU, so a GPU has done its work too."""
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


if __name__ == "__main__":
    main()
