#!/usr/bin/env python
"""What Paper B's parts cost a training step: the learned depth law, and the orthogonal injection over plain addition.

The law: seconds of its update, the next step's law and draws, and its share of the digest that ranks compare, over those of a
step. The injection: whole steps of the same depths with `ortho` and with `add`, in turn, best of each round.

    python tools/bench_depth.py [--width 128 --length 128 --batch 16 --groups 4 --rounds 7]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch

warnings.filterwarnings("ignore")

from loopscale.config import Config, from_values, settle  # noqa: E402
from loopscale.config.tree import DepthConfig  # noqa: E402
from loopscale.corpus.batches import StepBatch, collate  # noqa: E402
from loopscale.corpus.packing import Sample  # noqa: E402
from loopscale.depth import GroupSums, draw_depths, make_law  # noqa: E402
from loopscale.model.flops import count  # noqa: E402
from loopscale.model.ring import Ring  # noqa: E402
from loopscale.parallel import mesh as meshes  # noqa: E402
from loopscale.parallel.mesh import Mesh  # noqa: E402
from loopscale.train.step import TrainStep  # noqa: E402

VOCABULARY = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("length", 128), ("batch", 16), ("groups", 4), ("rounds", 7), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mesh = meshes.start(Config().parallel)
    steps = {name: training(options, mesh, name) for name in ("ortho", "add")}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(min(timed(step) for _ in range(3)))
    ratio = statistics.median(a / b for a, b in zip(seconds["ortho"], seconds["add"], strict=True))
    each = statistics.median(seconds["ortho"])
    print(f"step of {options.batch} x {options.length} tokens, width {options.width}: {1e3 * each:.0f} ms")
    print(f"ortho over add: {ratio - 1:+.2%} of a step")
    own = controller(options.groups)
    print(f"learned law: {1e6 * own:.0f} us a step, {own / each:.3%} of it")


def training(options: argparse.Namespace, mesh: Mesh, inject: str) -> Callable[[], object]:
    """A step of fixed depth 5."""
    config = from_values(
        Config,
        {
            "corpus": {"sequence_length": options.length},
            "model": {
                "vocab_size": VOCABULARY, "hidden_size": options.width, "heads": 4, "kv_heads": 2,
                "ffn_size": 11 * options.width // 4, "inject": inject,
            },
            "depth": {"prior": "fixed", "mean": 5, "groups": options.groups},
            "batch": {"global_batch": options.batch},
        },
    ).config  # fmt: skip
    batch = settle(config.batch, config.depth.groups, 1)
    train = TrainStep(config, batch, Ring.of(config, count(config.model, options.length)), mesh)
    source = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (batch.global_batch, options.length + 1), generator=source)
    starts = torch.zeros(1, dtype=torch.int64)
    samples = [Sample(row, starts, row[1:].clone()) for row in rows]
    numbered = [collate(samples[i : i + batch.microbatch], list(range(i, i + batch.microbatch)))
                for i in range(0, batch.global_batch, batch.microbatch)]  # fmt: skip
    per = batch.microbatches_per_group
    groups = tuple(tuple(numbered[g * per : (g + 1) * per]) for g in range(batch.groups))
    return lambda: train(0, StepBatch(groups, 0, batch.global_batch))


def controller(groups: int, steps: int = 2000) -> float:
    """Seconds a step of a law over 64 depths."""
    config = DepthConfig(prior="learned", burn_in=0)
    law, source = make_law(config), random.Random(1)
    began = time.perf_counter()
    for step in range(steps):
        depths = draw_depths(law.at(0.0), 1, step, groups)
        law.update([GroupSums(depth, 1000 * source.uniform(3, 5), 1000) for depth in depths])
        if step % config.check_every == 0:
            law.digest()
    return (time.perf_counter() - began) / steps


def timed(step: Callable[[], object]) -> float:
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


if __name__ == "__main__":
    main()
