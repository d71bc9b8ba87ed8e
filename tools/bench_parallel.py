#!/usr/bin/env python
"""Layouts on real ranks of this machine, one thread each: what the ring plan predicts and what comes of it.

Every line is a fresh set of processes that train a looped model (R = 4 visits, 8 microbatches) on random tokens.
Predictions follow from the operation times of that same run: the plan made with them, against the measured time of its
step. The last lines run the same plan loop by loop with a drain between loops, the way a pipeline schedule that knows
nothing of loops would, and set the looped model against a dense one of as many operations on the same layout.

    python tools/bench_parallel.py [--only layouts drain memory dense] [--width 256 --length 128 --microbatch 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

warnings.filterwarnings("ignore")

LOOPED = {"model.prelude_layers": 1, "model.core_layers": 3, "model.coda_layers": 1, "depth.mean": 4}
DENSE = {"model.prelude_layers": 1, "model.core_layers": 12, "model.coda_layers": 1, "depth.mean": 1}
ROUNDS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process": {},
    "PP2": {"parallel.pipeline": 2},
    "TP2": {"parallel.tensor": 2},
    "TP2 sequence parallel": {"parallel.tensor": 2, "parallel.sequence_parallel": True},
    "DP2": {"world": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["layouts", "drain", "memory", "dense"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    for name, default in (("width", 256), ("length", 128), ("microbatch", 4), ("microbatches", 8), ("steps", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    base = {
        "corpus.sequence_length": options.length,
        "model.hidden_size": options.width,
        "model.heads": 8,
        "model.kv_heads": 8,
        "model.ffn_size": round(options.width * 8 / 3 / 8) * 8,  # a layer of 12 d² weights
        "model.vocab_size": 24 * options.width,  # the head costs as much as two layers
        "depth.prior": "fixed",
        "depth.groups": 1,
        "depth.backprop": "null",
        "batch.global_batch": options.microbatch * options.microbatches,
        "parallel.timeout": 300,
    }
    micro = {"batch.microbatch": options.microbatch}
    if "layouts" in options.only:
        layouts(base | micro | LOOPED, options.steps)
    if "drain" in options.only:
        drain(base | micro | LOOPED | LAYOUTS["PP2"], options.steps)
    if "memory" in options.only:
        memory(base | micro | LOOPED | LAYOUTS["PP2"])
    if "dense" in options.only:
        dense(base | micro, options.steps)


# ---- the tables


def layouts(base: dict[str, Any], steps: int) -> None:
    """The best of several rounds, by turns. DP2 exchanges nothing within a step: its speed-up is what two cores of this
    machine give to two processes."""
    print(f"{'':<22} {'':>8} {'':>9} {'speed-up':>29} {'idle':>19} {'sent':>12} {'memory':>8}")
    print(
        f"{'layout':<22} {'ms/step':>8} {'tokens/s':>9} {'measured':>9} {'predicted':>10} {'reached':>8} {'measured':>9} "
        f"{'predicted':>9} {'bytes/token':>12} {'MB/rank':>8}"
    )
    best: dict[str, dict[str, Any]] = {}
    for name, layout in [*LAYOUTS.items()] * ROUNDS:
        found = measure(base | layout, steps)
        if name not in best or found["step"] < best[name]["step"]:
            best[name] = found
    alone = best["1 process"]["step"]
    for name, layout in LAYOUTS.items():
        found = best[name]
        predicted = alone / found["predicted"] if "parallel.pipeline" in layout else None
        speed_up = alone / found["step"]
        print(
            f"{name:<22} {found['step'] * 1e3:>8.0f} {found['tokens'] / found['step']:>9,.0f} {speed_up:>8.2f}x "
            f"{_or_dash(predicted, '.2f'):>10} {_or_dash(predicted and speed_up / predicted, '.2f'):>8} {found['idle']:>9.1%} "
            f"{found['idle_predicted']:>9.1%} {found['bytes_per_token']:>12,.0f} {found['memory'] / 1e6:>8.0f}"
        )


def drain(base: dict[str, Any], steps: int) -> None:
    found = measure(base | {"drained": True}, steps)
    print(
        f"\nPP2, loop by loop with a drain: {found['drained'] * 1e3:.0f} ms a step; the ring: {found['step'] * 1e3:.0f} ms, "
        f"{found['drained'] / found['step']:.2f}x as fast; visits kept at most {found['kept']}, drained {found['kept_drained']}"
    )


def memory(base: dict[str, Any]) -> None:
    print("\nPP2: peak of activations, MB over the memory before the first step (visits kept at most), home | slice")
    print("in flight    " + "".join(f"{f'b = {b}':>26}" for b in (1, 2, 4)))
    for in_flight in (1, 2, 4, 8):
        cells = []
        for b in (1, 2, 4):
            found = measure(base | {"parallel.in_flight": in_flight, "depth.backprop": b}, 1)
            grown = [f"{m / 1e6:.0f} ({k})" for m, k in zip(found["grown"], found["kept"], strict=True)]
            cells.append(f"{' | '.join(grown):>26}")
        print(f"{in_flight:>9}    {''.join(cells)}")


def dense(base: dict[str, Any], steps: int) -> None:
    print("\nlooped against dense of as many operations, tokens/s")
    for name in ("1 process", "PP2", "TP2"):
        rates = {}
        for kind, shape in (("dense", DENSE), ("looped", LOOPED)):
            found = measure(base | shape | LAYOUTS[name], steps)
            rates[kind] = found["tokens"] / found["step"]
        print(f"{name:<22} looped {rates['looped']:,.0f}  dense {rates['dense']:,.0f}  {rates['looped'] / rates['dense']:.2f}")


def measure(choices: dict[str, Any], steps: int) -> dict[str, Any]:
    """Runs ``steps`` timed steps on fresh ranks and returns what rank 0 found."""
    size = choices.get("world") or choices.get("parallel.tensor", 1) * choices.get("parallel.pipeline", 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), __file__]
    command += ["--worker", json.dumps({**choices, "steps": steps})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(done.stderr[-3000:])
    return json.loads(lines[-1])


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


# ---- one rank


def work(choices: dict[str, Any]) -> None:
    import torch

    from loopscale.config import Config, load, settle
    from loopscale.model.flops import count
    from loopscale.model.inputs import Documents, Inputs
    from loopscale.model.ring import Ring, work_of
    from loopscale.objective.supervision import exits
    from loopscale.parallel import mesh as meshes
    from loopscale.parallel.ring.execute import Task, execute
    from loopscale.parallel.ring.plan import Costs, Kind
    from loopscale.plan.timetable import idle_shares, kept_visits
    from loopscale.train.measure import Stopwatch
    from loopscale.train.step import TrainStep

    torch.set_num_threads(1)
    steps, drained = choices.pop("steps"), choices.pop("drained", False)
    choices.pop("world", None)
    overrides = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in choices.items()]
    config = load(Config, "configs/presets/fixedpoint-s.yaml", [*overrides, "train.steps=1000"]).config
    mesh = meshes.start(config.parallel)
    batch = settle(config.batch, config.depth.groups, mesh.data_size)
    ring = Ring.of(config, count(config.model, config.corpus.sequence_length))
    train = TrainStep(config, batch, ring, mesh)

    depth, length = config.depth.evaluation_depth, config.corpus.sequence_length
    source = torch.Generator().manual_seed(mesh.data_rank)
    tasks, each = [], work_of(config, depth)
    for _ in range(batch.accumulation):
        tokens = torch.randint(config.model.vocabulary, (batch.microbatch, length + 1), generator=source)
        documents = Documents.whole(batch.microbatch, length, mesh.device)
        inputs = Inputs(tokens[:, :-1], tokens[:, 1:].contiguous(), documents, torch.arange(batch.microbatch), final_visit=depth)
        scale = 1 / (batch.global_batch * length)
        tasks.append(Task(inputs, depth, each.gradient_visits, exits(config.objective, depth, each.gradient_visits), scale))
    plan = ring.plan([each] * len(tasks))
    operations = tuple(loop_by_loop(plan, stage) for stage in range(plan.stages))
    by_loop = replace(plan, operations=operations) if drained else None

    watch, phase, waited, draining = Stopwatch(mesh.device), [None], [0.0], [False]
    receive = mesh.links.take

    def take(message: Any) -> Any:  # the wait for a message belongs to no operation
        before = time.perf_counter()
        arrived = receive(message)
        watch.pause(time.perf_counter() - before)
        waited[0] += time.perf_counter() - before
        return arrived

    mesh.links.take = take

    def tell(operation: Any) -> None:
        watch.begin(operation)
        loop = (operation.kind, operation.visit)
        if draining[0] and operation.kind in (Kind.VISIT, Kind.VISIT_BACKWARD) and phase[0] != loop:
            before = time.perf_counter()
            torch.distributed.barrier()
            watch.pause(time.perf_counter() - before)
            waited[0] += time.perf_counter() - before
            phase[0] = loop

    held = resident()
    seconds, drained_seconds, waits, sent = [], [], [], 0
    for step in range(steps + 2):  # two to warm up
        torch.distributed.barrier()
        waited[0], sent, before = 0.0, mesh.links.bytes_sent, time.perf_counter()
        execute(plan, train.stage, tasks, mesh.links, tell=tell)
        watch.end()
        torch.distributed.barrier()
        if step >= 2:
            seconds.append(time.perf_counter() - before)
            waits.append(waited[0])
        train.optimizer.drop_gradients()
        if by_loop is not None:  # by turns with the ring: the machine is not equally fast at all times
            draining[0], before = True, time.perf_counter()
            execute(by_loop, train.stage, tasks, mesh.links, tell=tell)
            watch.end()
            torch.distributed.barrier()
            drained_seconds.append(time.perf_counter() - before)
            draining[0] = False
            train.optimizer.drop_gradients()
    sent = mesh.links.bytes_sent - sent
    grown = peak() - held

    own = {
        **{kind.value: watch.median(kind) for kind in Kind},
        "waited": statistics.median(waits), "sent": sent, "peak": peak(), "grown": grown,
    }  # fmt: skip
    ranks = meshes.gather_objects(own)
    stages = ranks[:: mesh.world // mesh.stages]  # one rank of each stage
    costs = Costs(
        stages[0]["prelude"], tuple(s["visit"] for s in stages), tuple(s["visit_backward"] for s in stages), stages[0]["exit"],
        stages[0]["prelude_backward"],
    )  # fmt: skip
    timed = replace(ring, costs=costs).plan([each] * len(tasks))
    took = statistics.median(seconds)
    if mesh.is_main:
        print(json.dumps({
            "step": took, "best": min(seconds), "drained": statistics.median(drained_seconds[2:] or [0.0]),
            "kept_drained": [kept_visits(by_loop, stage) for stage in range(plan.stages)] if by_loop else None,
            "tokens": batch.global_batch * length, "predicted": timed.makespan,
            "idle": statistics.mean(r["waited"] for r in ranks) / took, "idle_predicted": statistics.mean(idle_shares(timed)),
            "bytes_per_token": sum(r["sent"] for r in ranks) / (batch.global_batch * length),
            "memory": max(r["peak"] for r in ranks), "grown": [s["grown"] for s in stages],
            "kept": [kept_visits(plan, stage) for stage in range(plan.stages)], "slices": ring.slices,
            "costs": {k: v for k, v in own.items() if isinstance(v, float)},
        }))  # fmt: skip


def loop_by_loop(plan: Any, stage: int) -> tuple[Any, ...]:
    """A stage's operations when every loop passes all microbatches before the next one begins."""
    kinds = ["prelude", "visit", "exit", "visit_backward", "prelude_backward"]

    def key(operation: Any) -> tuple[int, int, int]:
        kind, m, visit = operation
        backwards = kind in ("visit_backward", "prelude_backward")
        return (kinds.index(kind) if kind not in ("visit", "exit") else 1, -visit if backwards else visit, m)

    return tuple(sorted(plan.operations[stage], key=lambda o: (key(o)[0], key(o)[1], kinds.index(o.kind), o.microbatch)))


def resident() -> int:
    """Bytes of this process in memory now."""
    import psutil

    return psutil.Process().memory_info().rss


def peak() -> int:
    """Bytes of this process in memory at most, so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
