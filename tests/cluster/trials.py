"""Trials on a real SLURM: ``python -m tests.cluster.trials [NAME ...]``, some half an hour on two cores for all of them.

Every layout trains the same run; then runs are preempted, timed out, lose a node or a cable, and must end with the losses of one
process, each step once. A line for each trial: what happened, starts, the largest difference of a loss, seconds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from loopscale.cluster.ledger import Ledger
from tests.cluster.slurm import ROOT, Cluster, Launched
from tests.conftest import TINY, Runs
from tests.corpus.conftest import built, texts, write_jsonl

STEPS = 300
TOLERANCE = 1e-3
SETTINGS = (f"train.steps={STEPS}", "parallel.timeout=20", "train.grace=12")


@dataclass
class Stand:
    """A cluster, and the losses that every run must have."""

    folder: Path
    cluster: Cluster
    corpus: Path
    expected: list[float]

    def launched(self, name: str) -> Launched:
        return Launched(self.folder, self.corpus, name)

    def finish(self, launched: Launched, seconds: float = 400) -> str:
        """Waits for the run's end; returns its figures. Raises :class:`AssertionError` where it is not as it must be."""
        launched.wait(lambda: launched.standing().state == "COMPLETED", seconds)
        return compare(launched, self.expected)


def compare(launched: Launched, expected: list[float]) -> str:
    """A run's starts and the largest difference of a loss. Raises :class:`AssertionError` unless it has each step once."""
    records = launched.records()
    assert [r["step"] for r in records] == list(range(1, len(expected) + 1)), "steps are missing or twice"
    worst = max(abs(r["loss"] - e) for r, e in zip(records, expected, strict=True))
    assert worst < TOLERANCE, f"a loss differs by {worst:.2g}"
    events = [e["event"] for e in launched.ledger.events()]
    return f"{events.count('started')} starts ({' '.join(events)}), losses within {worst:.1e}"


def alone(folder: Path, corpus: Path, *overrides: str) -> list[float]:
    """The losses of one process that nothing disturbs."""
    runs = Runs(folder, corpus)
    folder.mkdir()
    subprocess.run(runs.command("alone", *overrides), check=True, capture_output=True, cwd=ROOT)
    return [r["loss"] for r in runs.records("alone")]


def layout(nodes: int, devices: int, *overrides: str) -> Callable[[Stand], str]:
    def trial(stand: Stand) -> str:
        launched = stand.launched(f"n{nodes}x{devices}" + "".join(o.split("=")[0][-2:] for o in overrides))
        began = time.monotonic()
        launched.submit(*SETTINGS, *overrides, nodes=nodes, devices=devices)
        submitted = time.monotonic() - began
        launched.wait_for_step(1)
        first = time.monotonic() - began
        return f"{stand.finish(launched)}; submit {submitted:.1f} s, first step after {first:.1f} s"

    return trial


def demo(stand: Stand) -> str:
    """The first steps of `make demo`, on its corpus, at three layouts."""
    corpus, config = ROOT / "data/sotu", ROOT / "configs/run/demo.yaml"
    assert corpus.exists(), "loopscale corpus build configs/corpus/sotu.yaml makes the demo's corpus"
    # eps: Adam makes a full step of the rounding of a gradient that is next to nothing, and at the demo's rate that grows
    settings = ["train.steps=20", "log.every=1", "train.threads=1", "optimizer.eps=1e-4", "validation.sequences=8"]
    own = [f"run.folder={stand.folder / 'alone/runs'}", "run.name=demo", f"corpus.path={corpus}"]
    subprocess.run(
        [sys.executable, "-m", "loopscale", "train", str(config), *own, *settings], check=True, capture_output=True, cwd=ROOT
    )
    expected = [r["loss"] for r in Runs(stand.folder / "alone", corpus).records("demo")]
    told = []
    for nodes, devices in ((2, 1), (2, 2), (4, 1)):
        launched = Launched(stand.folder, corpus, f"demo-{nodes}x{devices}")
        began = time.monotonic()
        launched.submit(*settings, nodes=nodes, devices=devices, config=config)
        submitted = time.monotonic() - began
        launched.wait_for_step(1)
        first = time.monotonic() - began
        launched.wait_for_state("COMPLETED")
        worst = max(abs(r["loss"] - e) for r, e in zip(launched.records(), expected, strict=True))
        assert worst < TOLERANCE, f"a loss differs by {worst:.2g}"
        told.append(
            f"{nodes}x{devices} losses within {worst:.1e}, submitted in {submitted:.1f} s, first step after {first:.1f} s"
        )
    return "; ".join(told)


def preempted(stand: Stand) -> str:
    launched = stand.launched("preempted")
    launched.submit(*SETTINGS, nodes=2, devices=1)
    launched.wait_for_step(30)
    stand.cluster.preempt()
    launched.wait(lambda: launched.ledger.events()[-1]["event"] == "interrupted")
    assert launched.standing().state == "PENDING", launched.standing()
    return stand.finish(launched)


def timed_out(stand: Stand) -> str:
    """Two minutes a job: the run stops by itself and is queued again, until it is done."""
    launched, steps = stand.launched("timed-out"), 1300
    # lr: at 3e-3 rounding grows at this width, to 0.1 nats, as it does between two layouts that nothing disturbs
    slow = ["model.hidden_size=128", "model.ffn_size=256", "optimizer.lr=1e-4", f"train.steps={steps}"]
    launched.submit(*SETTINGS, *slow, nodes=2, devices=1, cluster=["job.time=2", "job.notice=30"])
    launched.wait(lambda: launched.standing().state == "COMPLETED", 900)
    told = compare(launched, alone(stand.folder / "alone-slow", stand.corpus, *slow))
    events = launched.ledger.events()
    interruptions = [e["message"] for e in events if e["event"] == "interrupted"]
    assert len(interruptions) >= 2, "it was to be interrupted twice"
    return f"{told}; the first ended with: {interruptions[0]}"


def node_lost(verb: str, index: int) -> Callable[[Stand], str]:
    """``verb`` as of `slurm-local`: kill, everything on the node is gone at once, or cut, its cable. The first node has the batch
    script and rank 0: there SLURM itself must find out, which takes it some 35 s."""

    def trial(stand: Stand) -> str:
        launched = stand.launched(f"{verb}-{index}")
        launched.submit(*SETTINGS, nodes=2, devices=1)
        launched.wait_for_step(60)
        node = launched.ledger.events()[-1]["nodes"][index]
        stand.cluster(verb, node)
        time.sleep(50)
        stand.cluster(*(("mend", node) if verb == "cut" else ("up",)))
        return stand.finish(launched)

    return trial


def chained(stand: Stand) -> str:
    """A queue that takes no job back: three jobs of two minutes; what is left when the run has finished is not needed."""
    launched = stand.launched("chained")
    asked = ["chain=3", "job.time=2", "job.notice=60"]
    launched.submit(*SETTINGS, "model.hidden_size=64", "train.steps=1000", nodes=1, devices=1, cluster=asked)
    launched.wait(lambda: launched.standing().state == "COMPLETED", 500)
    assert [r["step"] for r in launched.records()] == list(range(1, 1001))
    launched.wait(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout.strip())
    events = launched.ledger.events()
    return f"{' '.join(e['event'] for e in events)}; jobs {sorted({e['job'] for e in events})}, none waits"


def without_a_trace(stand: Stand) -> str:
    """All tasks and srun are killed at once: nobody can say why."""
    launched = stand.launched("without-a-trace")
    launched.submit(*SETTINGS, nodes=2, devices=1)
    launched.wait_for_step(60)
    for process in psutil.process_iter(["cmdline"]):
        if any(str(launched.path) in word for word in process.info["cmdline"] or []):
            process.kill()
    return stand.finish(launched)


def sick_node(stand: Stand) -> str:
    """Two nodes and two spares; the second node's cable is slow, both ways."""
    slow = ["tc", "qdisc", "add", "dev"]
    rate = ["root", "tbf", "rate", "20mbit", "burst", "64kb", "latency", "400ms"]
    subprocess.run([*slow, "sl-node2", *rate], check=True)
    subprocess.run(["ip", "netns", "exec", "sl-node2", *slow, "eth0", *rate], check=True)
    try:
        launched = stand.launched("sick-node")
        launched.submit(*SETTINGS, nodes=2, devices=1, cluster=["job.spares=2", "preflight.network_share=0.4"])
        launched.wait_for_step(1)
        standing = launched.standing()
        found = (launched.path / "launch/preflight.json").read_text()
        assert standing.note.startswith("without node2: receives from node1 at "), f"{standing} {found}"
        return f"{standing.note}; {stand.finish(launched)}"
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "sl-node2", "root"], check=True)
        subprocess.run(["ip", "netns", "exec", "sl-node2", "tc", "qdisc", "del", "dev", "eth0", "root"], check=True)


def rehearsal(stand: Stand) -> str:
    """The 1.6B run at two nodes of two ranks, as toy widths; its own vocabulary, the corpus of the trials."""
    launched = stand.launched("l-rehearsal")
    command = [
        str(ROOT / "configs/run/fixedpoint-l-1p6b.yaml"),
        "--cluster",
        str(ROOT / "configs/cluster/local.yaml"),
        "--rehearse",
    ]
    launched.command("slurm", *command, "run.name=l", f"corpus.path={stand.corpus}", "model.vocab_size=null")
    launched.wait(lambda: launched.standing().state == "COMPLETED", 500)
    records = launched.records()
    assert [r["step"] for r in records] == list(range(1, 9)) and len(records[0]["depths"]) == 16
    return f"8 steps, {len(records[0]['depths'])} depth groups, loss {records[0]['loss']:.3f} to {records[-1]['loss']:.3f}"


def study(stand: Stand) -> str:
    """Six runs, two at a time; one is cancelled, and requeued."""
    (stand.folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    arms = [{"name": f"lr{n}", "set": [f"optimizer.lr={n}e-3"]} for n in (1, 2, 3)]
    own = [f"corpus.path={stand.corpus}", f"train.steps={STEPS}"]
    (stand.folder / "rates.yaml").write_text(yaml.safe_dump({"config": "tiny.yaml", "set": own, "arms": arms, "seeds": [1, 2]}))
    launched = stand.launched("rates")
    cluster = ["--cluster", str(ROOT / "configs/cluster/local.yaml"), "cluster.job.nodes=1", "cluster.job.devices=1"]
    launched.command("slurm", "--study", "rates.yaml", *cluster, "--at-once", "2")
    names = [f"lr{n}-s{s}" for s in (1, 2) for n in (1, 2, 3)]
    runs = {name: Launched(launched.path.parent, stand.corpus, f"rates/{name}") for name in names}
    for name, run in runs.items():
        run.folder, run.path = stand.folder, launched.path / name
        run.ledger = Ledger(run.path)
    most = 0
    cancelled = runs["lr2-s1"]
    while any(run.standing().state != "COMPLETED" for run in runs.values()):
        states = [run.standing().state for run in runs.values()]
        most = max(most, states.count("RUNNING"))
        if cancelled.standing().state == "RUNNING" and cancelled.records() and len(cancelled.ledger.events()) == 2:
            cancelled.command("cancel", "rates/lr2-s1")
        elif cancelled.standing().state == "CANCELLED":
            cancelled.command("requeue", "rates/lr2-s1")
        time.sleep(0.5)
    assert most == 2, f"{most} at once"
    for run in runs.values():
        assert [r["step"] for r in run.records()] == list(range(1, STEPS + 1))
    return f"6 runs, {most} at once; the cancelled one: {' '.join(e['event'] for e in cancelled.ledger.events())}"


TRIALS = {
    2: {"2x1": layout(2, 1), "2x2": layout(2, 2), "2x2 PP2": layout(2, 2, "parallel.pipeline=2"), "preempted": preempted,
        "timed-out": timed_out, "node-killed": node_lost("kill", 1), "first-node-killed": node_lost("kill", 0),
        "cable-cut": node_lost("cut", 1),
        "study": study, "chained": chained, "without-a-trace": without_a_trace, "rehearsal": rehearsal},
    4: {"demo": demo, "sick-node": sick_node, "4x1": layout(4, 1), "4x1 TP2": layout(4, 1, "parallel.tensor=2")},
}  # fmt: skip
"""By the number of the cluster's nodes."""


def main(names: list[str]) -> int:
    failed = 0
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    corpus = folder / "corpus"
    built(corpus, write_jsonl(folder / "texts.jsonl", texts(300)))
    expected = alone(folder / "alone", corpus, f"train.steps={STEPS}")
    for nodes, trials in TRIALS.items():
        wanted = {name: trial for name, trial in trials.items() if not names or name in names}
        if not wanted:
            continue
        with Cluster(folder, nodes).running() as cluster:
            for name, trial in wanted.items():
                began = time.monotonic()
                try:
                    told = trial(Stand(folder, cluster, corpus, expected))
                except (AssertionError, RuntimeError) as error:
                    told, failed = f"FAILED: {error}", failed + 1
                print(f"{name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    shutil.rmtree(folder)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
