"""Before the first step: what every node can do.

``python -m loopscale.cluster.preflight SETTINGS`` is started once per device, with torchrun's variables; the last line that it
prints is the verdict, the same on every rank: rank 0 hears all of them and judges.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import DistError

import loopscale
from loopscale.cluster.judge import Facts, Verdict, judge, refusal
from loopscale.cluster.ledger import FOLDER
from loopscale.config.cluster import PreflightConfig
from loopscale.durable import write_json

PACKAGES = ("torch", "megatron-core", "deepspeed", "mosaicml-streaming", "numpy", "tokenizers", "submitit")
MATRIX, MATRIX_CPU = 8192, 512
"""Rows and columns of the product that measures a device, a GPU or a core."""
MESSAGE = 1 << 24
"""Bytes that each node sends its neighbour."""


def examine(run: Path, token: str, devices: int, gpus: bool, several: bool, settings: PreflightConfig) -> Facts:
    """What can be found out without the other ranks."""
    return Facts(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        code=_code_digest(),
        disk=_free(run),
        shm=_free(Path("/dev/shm")),
        sees_run=_read(run / FOLDER / "token") == token,
        address=_address(),
        problems=list(_own_problems(devices, gpus, several, settings)),
    )


def _own_problems(devices: int, gpus: bool, several: bool, settings: PreflightConfig) -> list[str]:
    found = []
    here = torch.cuda.device_count()
    if gpus and here < devices:
        found.append(f"torch sees {here} of its {devices} GPUs")
    if settings.interface is not None and settings.interface not in psutil.net_if_addrs():
        found.append(f"has no network interface {settings.interface} (it has {', '.join(sorted(psutil.net_if_addrs()))})")
    if several and settings.interface is None and _address().startswith("127."):
        found.append("reaches the first node by the loopback address only; set preflight.interface")
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _code_digest() -> str:

    digest, package = sha256(), Path(loopscale.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _free(folder: Path) -> float:
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return 0.0


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _address() -> str:
    """By which this node reaches the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # sends nothing
        try:
            way.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError:
            return ""
        return str(way.getsockname()[0])


# ---- with the other ranks


class _Meeting:
    """All ranks, in a store of rank 0: they tell what they found, measure together, and hear the verdict."""

    def __init__(self, nodes: Sequence[str], settings: PreflightConfig):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.devices = int(os.environ["LOCAL_WORLD_SIZE"])
        self.nodes, self.settings = nodes, settings
        self.patience = timedelta(seconds=settings.timeout)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, self.world, self.rank == 0, self.patience, wait_for_workers=False)

    def lead(self, own: Facts, ended: Callable[[int], str | None], needed: int) -> tuple[Verdict, dict[int, Facts]]:
        """Rank 0's part; ``ended`` knows why another rank has ended before it came."""
        facts, missing = {0: own}, dict.fromkeys(range(1, self.world), "")
        deadline = time.monotonic() + self.settings.timeout
        while missing and time.monotonic() < deadline and not all(missing.values()):
            for rank in list(missing):
                if self.store.check([f"facts/{rank}"]):
                    facts[rank] = Facts(**json.loads(self.store.get(f"facts/{rank}")))
                    del missing[rank]
                else:
                    missing[rank] = ended(rank) or ""
            time.sleep(0.1)
        present = sorted(facts)
        self.store.set("go", json.dumps({"time": time.time(), "present": present}))
        facts[0] = self._measured(own, present)
        for rank in present[1:]:
            try:
                self.store.wait([f"measured/{rank}"], self.patience)
                facts[rank] = Facts(**json.loads(self.store.get(f"measured/{rank}")))
            except DistError:
                facts[rank] = replace(facts[rank], problems=[*facts[rank].problems, "fell silent while it was measured"])
        sick = judge(self.nodes, self.devices, facts, missing, self.settings)
        verdict = Verdict(sick, refusal(self.nodes, sick, needed))
        self.store.set("verdict", json.dumps(asdict(verdict)))
        with contextlib.suppress(DistError):  # the store ends with this process
            self.store.wait([f"heard/{rank}" for rank in present[1:]], timedelta(seconds=10))
        return verdict, facts

    def follow(self, own: Facts) -> Verdict:
        """The part of the other ranks."""
        self.store.set(f"facts/{self.rank}", json.dumps(asdict(own)))
        self.store.wait(["go"], 2 * self.patience)
        go = json.loads(self.store.get("go"))
        own = replace(own, clock=time.time() - go["time"])
        if self.rank in go["present"]:
            self.store.set(f"measured/{self.rank}", json.dumps(asdict(self._measured(own, go["present"]))))
        self.store.wait(["verdict"], 3 * self.patience)
        verdict = Verdict(**json.loads(self.store.get("verdict")))
        self.store.set(f"heard/{self.rank}", "")
        return verdict

    def _measured(self, own: Facts, present: Sequence[int]) -> Facts:
        """The rates of this rank's device and of its node's link, measured by all ``present`` ranks at once."""
        try:
            device = _device()
            matmul = _matmul(device)
            group = dist.PrefixStore("measure", self.store)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=group, rank=present.index(self.rank), world_size=len(present), timeout=self.patience
            )
            try:
                received = self._received(device, present)
            finally:
                dist.destroy_process_group()
        except (RuntimeError, DistError) as error:  # of a device or a network
            told = (str(error).splitlines() or [type(error).__name__])[0]
            return replace(own, problems=[*own.problems, f"could not be measured: {told}"])
        return replace(own, matmul=matmul, received=received)

    def _received(self, device: torch.device, present: Sequence[int]) -> float | None:
        """Bytes per second from the node before, around the ring of the nodes' first ranks: the faster of two messages.

        Links are measured in turns in which a node only sends or only receives, so that a slow link slows no other."""
        ring = [i for i, rank in enumerate(present) if rank % self.devices == 0]
        here = present.index(self.rank)
        message = torch.zeros(MESSAGE, dtype=torch.uint8, device=device)
        best = math.inf
        for turn in turns(len(ring)):
            dist.barrier()
            for source, target in ((ring[s], ring[t]) for s, t in 2 * turn):
                if here == source:
                    dist.send(message, target)
                elif here == target:
                    began = time.perf_counter()
                    dist.recv(message, source)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    best = min(best, time.perf_counter() - began)
        return MESSAGE / best if best < math.inf else None


def turns(nodes: int) -> list[list[tuple[int, int]]]:
    """The links (from, to) of a ring, in turns: in each a node has part in one link at most."""
    links = [(node, (node + 1) % nodes) for node in range(nodes)] if nodes > 1 else []
    even = len(links) - len(links) % 2
    return [turn for turn in (links[:even:2], links[1:even:2], links[even:]) if turn]


def _device() -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    torch.set_num_threads(1)
    return torch.device("cpu")


def _matmul(device: torch.device) -> float:
    """Operations per second of a square product, the best of five."""
    on_gpu = device.type == "cuda"
    size = MATRIX if on_gpu else MATRIX_CPU
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        if on_gpu:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def main(arguments: Sequence[str]) -> int:
    asked: dict[str, Any] = json.loads(arguments[0])
    settings, nodes, run = PreflightConfig(**asked["settings"]), asked["nodes"], Path(asked["run"])
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    own = examine(run, asked["token"], devices, asked["gpus"], len(nodes) > 1, settings)
    meeting = _Meeting(nodes, settings)
    if meeting.rank:
        verdict = meeting.follow(own)
    else:
        ends = [Path(path) for path in asked["ends"]]
        verdict, facts = meeting.lead(own, lambda rank: _read(ends[rank]), asked["needed"])
        found = {"verdict": asdict(verdict), "ranks": {rank: asdict(of) for rank, of in sorted(facts.items())}}
        write_json(run / FOLDER / "preflight.json", found)
    print(json.dumps(asdict(verdict)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
