#!/usr/bin/env python
"""Saving and loading against plain torch.save of the same bytes, saving in the background, and a checkpoint of 1e9 parameters.

throughput  Synthetic state (fp32 weights and two moments, --size MB in all) on 1 and on 2 ranks of this machine. Plain: every
            rank's torch.save of its share into one file, which is fsynced, and torch.load of it. Ours: store.save up to
            the commit, and what resuming does, which is verify (all files against the manifest), load, and the comparison
            of the elements with their digests. Best of --rounds, by turns, the slowest rank counts; reads come from the page
            cache for both. "ratio" is plain's time over ours: above 1 we are faster. Shares are what the parts of a save
            take by themselves, in the same process, as a share of the whole save.
background  A looped model trains on 1 rank. "stall" is how long a request keeps the loop, "while saving" the steps until the
            commit: they share this machine's cores with the saver. Memory is the peak during a save above that without.
large       1e9 parameters and both moments, 12 GB, saved by 4 processes that talk over gloo, then rewritten in 3 parts by one.
            Elements are made when they are written, or with --hold lie in memory as a run's do. Peak memory of every process.
            Needs 30 GB of disk in --folder, all of which is removed again.

    python tools/bench_checkpoint.py [--only throughput background large] [--size 1000] [--folder .]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

PARTS = ("throughput", "background", "large")
SIDE = 2048
"""Of the synthetic matrices."""
LARGE_WIDTH, LARGE_ROWS = 4096, 244_141
"""1e9 parameters and 1536, in one matrix."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:2], help="large is run when it is asked for")
    parser.add_argument("--size", type=int, default=1000, help="MB of state for throughput (1000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512, help="of the model that trains (512)")
    parser.add_argument("--hold", action="store_true", help="large: 3 GB of state lie in the memory of each of the 4 processes")
    parser.add_argument("--folder", type=Path, default=Path(), help="where files are written, in a folder that is removed")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-") as folder:
        if "throughput" in options.only:
            show_throughput(folder, options.size, options.rounds)
        if "background" in options.only:
            show_background(folder, options.width)
        if "large" in options.only:
            show_large(folder, options.hold)


# ---- the tables


def show_throughput(folder: str, size: int, rounds: int) -> None:
    print(f"{size} MB of state, best of {rounds} by turns")
    print(f"{'':<22} {'save s':>8} {'MB/s':>7} {'ratio':>6}   {'load s':>8} {'MB/s':>7} {'ratio':>6}")
    for ranks in (1, 2):
        found = run(ranks, "throughput", folder=folder, size=size, rounds=rounds)
        mb = found["bytes"] / 1e6
        ours = {"save": found["save"], "load": found["verify"] + found["load"] + found["digests"]}
        for name, save, load in (("plain", found["plain save"], found["plain load"]), ("ours", ours["save"], ours["load"])):
            ratios = (found["plain save"] / save, found["plain load"] / load)
            print(
                f"{f'{ranks} rank(s), {name}':<22} {save:>8.2f} {mb / save:>7.0f} {ratios[0]:>6.2f}   {load:>8.2f} "
                f"{mb / load:>7.0f} {ratios[1]:>6.2f}"
            )
        shares = ", ".join(f"{part} {found[part] / found['save']:.0%}" for part in ("write", "fsync", "sha256", "element digest"))
        load = ", ".join(f"{part} {found[part] / ours['load']:.0%}" for part in ("verify", "load", "digests"))
        print(f"{'':<22} save: {shares}; load: {load}")


def show_background(folder: str, width: int) -> None:
    found = run(1, "background", folder=folder, width=width)
    step = found["step"]
    print(f"\n{found['bytes'] / 1e6:.0f} MB of state, steps of {step * 1e3:.0f} ms")
    print(f"save at once          {found['at once']:.2f} s = {found['at once'] / step:.1f} steps stand still")
    print(f"in the background     stall {found['stall'] * 1e3:.0f} ms = {found['stall'] / step:.2f} steps")
    slower = found["while saving"] / step
    print(f"steps while saving    {found['while saving'] * 1e3:.0f} ms, {slower:.2f} of those without ({found['count']} steps)")
    print(f"memory above without  {found['memory'] / 1e6:.0f} MB, predicted {found['bytes'] / 1e6:.0f} MB")


def show_large(folder: str, hold: bool) -> None:
    if (free := shutil.disk_usage(folder).free) < 30e9:
        raise SystemExit(f"large needs 30 GB in {folder}, which has {free / 1e9:.0f} GB free; give another --folder")
    found = run(4, "large", folder=folder, hold=hold)
    held = "in memory" if hold else "made when it is written"
    print(f"\n{found['bytes'] / 1e9:.1f} GB of state, {found['bytes'] / 4e9:.1f} GB in each of 4 processes, {held}")
    print(f"saved     {found['seconds']:>5.0f} s, peak GiB {', '.join(f'{peak / 2**30:.2f}' for peak in found['peaks'])}")
    found = run(1, "reshard", folder=folder)
    print(f"resharded {found['seconds']:>5.0f} s, peak GiB {found['peak'] / 2**30:.2f} ({found['parts']} parts, verified before)")


# ---- the processes


def run(ranks: int, part: str, **values: Any) -> dict[str, Any]:
    """What rank 0 of as many processes answers."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--worker", json.dumps({"part": part, **values})]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": threads})
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def work(part: str, **values: Any) -> None:
    import torch.distributed as dist

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    answer = {"throughput": throughput, "background": background, "large": large, "reshard": rewrite}[part](**values)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(answer))


def place() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def throughput(folder: str, size: int, rounds: int) -> dict[str, float]:
    import torch

    from loopscale.checkpoint import store
    from loopscale.checkpoint.commit import Folder
    from loopscale.checkpoint.parts import AT_ONCE, Piece

    rank, world = place()
    count, draw = max(1, round(size * 1e6 / 12 / SIDE**2)), torch.Generator().manual_seed(rank)
    rows = range(SIDE * rank // world, SIDE * (rank + 1) // world)
    pieces = [
        Piece(f"{kind}/core.{i}.q", (SIDE, SIDE), (rows.start, 0), torch.randn(len(rows), SIDE, generator=draw))
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for i in range(count)
    ]
    snapshot = store.Snapshot(1, pieces, {}, {"config.yaml": "x: 1"})
    checkpoint, plain, raw = Path(folder) / "step-1", Path(folder) / f"plain-{rank}.pt", Path(folder) / f"raw-{rank}"

    def plain_save() -> None:
        with plain.open("wb") as file:
            torch.save({p.name: p.here for p in pieces}, file)
            file.flush()
            os.fsync(file.fileno())

    def write() -> None:
        with raw.open("wb") as file:
            for piece in pieces:
                flat = piece.here.view(-1).numpy().data.cast("B")
                for at in range(0, len(flat), AT_ONCE):
                    file.write(flat[at : at + AT_ONCE])

    def fsync() -> None:
        with raw.open("rb+") as file:
            os.fsync(file.fileno())

    def sha256() -> None:
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece.here.view(-1).numpy().data)

    actions: dict[str, Callable[[], Any]] = {
        "write": write,
        "fsync": fsync,
        "sha256": sha256,
        "element digest": lambda: [int(piece.digest()) for piece in pieces],
        "plain save": plain_save,
        "save": lambda: store.save(Folder(Path(folder)), snapshot),
        "plain load": lambda: torch.load(plain),
        "verify": lambda: store.verify(checkpoint),
        "load": lambda: store.load(checkpoint, pieces),
        "digests": lambda: store.compare_digests(checkpoint, pieces),
    }
    best = dict.fromkeys(actions, math.inf)
    for _ in range(rounds):
        for name, action in actions.items():
            best[name] = min(best[name], together(action))
            if name == "fsync":
                raw.unlink()
        plain.unlink()
        if rank == 0:
            shutil.rmtree(checkpoint)
    return {**best, "bytes": 12.0 * count * SIDE**2}


def together(action: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    barrier()
    before = time.perf_counter()
    action()
    barrier()
    return time.perf_counter() - before


def barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def background(folder: str, width: int, steps: int = 5) -> dict[str, float]:
    import torch

    from loopscale.checkpoint.commit import Folder
    from loopscale.checkpoint.saver import Saver
    from loopscale.checkpoint.store import Snapshot
    from loopscale.config.tree import CheckpointConfig, ModelConfig, OptimizerConfig, ParallelConfig
    from loopscale.model.inputs import Documents, Inputs
    from loopscale.model.stage import LoopedStage
    from loopscale.objective.supervision import Exit
    from loopscale.parallel import mesh as meshes
    from loopscale.parallel.ring.execute import Task, execute
    from loopscale.parallel.ring.links import Links
    from loopscale.parallel.ring.plan import plan
    from loopscale.parallel.zero import ZeroOptimizer
    from loopscale.train import snapshot

    mesh = meshes.start(ParallelConfig())
    visits, batch, length, vocabulary = 2, 2, 64, 16 * width
    model = ModelConfig(vocab_size=vocabulary, hidden_size=width, heads=8, ffn_size=3 * width, core_layers=4)
    stage = LoopedStage(model, length, seed=1)
    kinds = {h.parameter: h.weights[0].kind for h, _ in stage.held()}
    optimizer = ZeroOptimizer({h.parameter: p for h, p in stage.held()}, kinds, OptimizerConfig(), 1)
    tokens = torch.randint(vocabulary, (batch, length + 1))
    inputs = Inputs(
        tokens[:, :-1], tokens[:, 1:].contiguous(), Documents.whole(batch, length, torch.device("cpu")), torch.arange(batch),
        final_visit=visits,
    )  # fmt: skip
    task = Task(inputs, visits, visits, (Exit(visits, (visits,)),), 1 / tokens[:, 1:].numel())
    ring = plan(1, [task.work], in_flight=1)

    def step() -> float:
        before = time.perf_counter()
        execute(ring, stage, [task], Links.alone())
        optimizer.step(0.1)
        return time.perf_counter() - before

    def content(number: int) -> Snapshot:
        return Snapshot(number, snapshot.own(stage, optimizer, mesh), {}, {"config.yaml": "x: 1"})

    saver = Saver(Folder(Path(folder)), CheckpointConfig(keep=1, background=True), None)
    step()
    at_once = min(timed(lambda: saver.save(content(1))), timed(lambda: saver.save(content(2))))
    alone, without = [step() for _ in range(steps)], peak_of(step)
    stalls, during, memory = [], list[float](), 0
    for number in (3, 4, 5):
        stalls.append(timed(lambda: saver.request(content(number))))  # noqa: B023  # it is called at once

        def until_saved() -> None:
            while not saver.is_done():
                during.append(step())

        memory = max(memory, peak_of(until_saved) - without)
        saver.wait()
    size = sum(piece.here.nbytes for piece in content(0).pieces)
    return {
        "step": statistics.median(alone), "at once": at_once, "stall": statistics.median(stalls),
        "while saving": statistics.median(during), "count": len(during), "memory": memory, "bytes": size,
    }  # fmt: skip


def timed(action: Callable[[], Any]) -> float:
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def peak_of(action: Callable[[], Any]) -> int:
    """Bytes of memory that this process has at most meanwhile."""
    import psutil
    import torch

    from loopscale.diagnostics.memory import PeakMemory

    before, memory = psutil.Process().memory_info().rss, PeakMemory(torch.device("cpu"))
    action()
    return before + memory.read()


def large(folder: str, hold: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from loopscale.checkpoint import store
    from loopscale.checkpoint.commit import Folder

    pieces = list(large_pieces(*place(), hold))
    snapshot = store.Snapshot(1, pieces, {"step": 1}, {"config.yaml": "x: 1"})
    peaks: list[Any] = [None] * dist.get_world_size()
    seconds = 0.0

    def save() -> None:
        nonlocal seconds
        seconds = together(lambda: store.save(Folder(Path(folder)), snapshot))

    dist.all_gather_object(peaks, peak_of(save))
    return {"seconds": seconds, "peaks": peaks, "bytes": 12 * LARGE_ROWS * LARGE_WIDTH}


def large_pieces(rank: int, world: int, hold: bool) -> Iterator[Any]:
    """This rank's rows of a weight and its moments, 64 MiB a box."""
    import torch

    from loopscale.checkpoint.parts import Piece

    @dataclass(frozen=True)
    class Made(Piece):
        """Numbers that the place in the tensor gives."""

        def read(self) -> torch.Tensor:
            first = self.offsets[0] * LARGE_WIDTH
            return torch.arange(first, first + self.here.numel()).remainder_(8191).float().view(self.here.shape)

    end = LARGE_ROWS * (rank + 1) // world
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for row in range(LARGE_ROWS * rank // world, end, 4096):
            shape = (min(4096, end - row), LARGE_WIDTH)
            made = Made(f"{kind}/a", (LARGE_ROWS, LARGE_WIDTH), (row, 0), torch.empty(shape, device="meta"))
            yield Piece(made.name, made.shape, made.offsets, made.read()) if hold else made


def rewrite(folder: str, parts: int = 3) -> dict[str, float]:
    from loopscale.checkpoint.reshard import reshard
    from loopscale.corpus.progress import Silent

    seconds = 0.0

    def act() -> None:
        nonlocal seconds
        seconds = timed(lambda: reshard(Path(folder) / "step-1", Path(folder) / "resharded", parts, Silent()))

    peak = peak_of(act)
    return {"seconds": seconds, "peak": peak, "parts": parts}


if __name__ == "__main__":
    main()
