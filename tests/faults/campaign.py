"""A campaign of faults: runs meet random faults, are started again, and end as if there had been none.

    python -m tests.faults.campaign --faults 90 --seed 1

Each trial draws a kind of fault, a layout and a moment, trains twenty small steps, and starts the run again with
``--resume auto`` until it ends by itself. It holds when

- every loss and every bit of the last checkpoint are those of an undisturbed run at the same layout (where a step was skipped
  because of a NaN, those of a run that skipped the same step, to 1e-5);
- a run that goes on does so from its newest whole checkpoint, which is at most ``checkpoint.every`` steps old;
- every process ends within the timeout and the time that it takes to find out who is lost;
- every process that ends by itself says why in a sentence, without a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.parts import read_index
from loopscale.checkpoint.store import load_whole
from loopscale.errors import CheckpointError
from tests.conftest import Runs
from tests.corpus.conftest import built, texts, write_jsonl
from tests.train.jobs import FAULTY_RANK, STARTING, Job

STEPS, EVERY = 20, 5
TIMEOUT = 12
"""``parallel.timeout``, seconds."""
EXPLAINING = 20
"""Seconds that ranks then have to find out who is lost, to say so and to end."""
ATTEMPTS = 5
DISK = 16 * 2**20
"""Bytes of the disk that fills up."""

LAYOUTS = {
    "one": (1, []),
    "DP2": (2, []),
    "TP2": (2, ["parallel.tensor=2"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "TP2xPP2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "PP2xDP2": (4, ["parallel.pipeline=2"]),
}
HOME = {"one": 1, "DP2": 2, "TP2": 2, "PP2": 1, "TP2xPP2": 2, "PP2xDP2": 2}
"""Ranks, the first ones, of the stage where losses arise."""


@dataclass(frozen=True)
class Trial:
    number: int
    kind: str
    layout: str
    seed: int

    @property
    def size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def name(self) -> str:
        return f"{self.number}-{self.kind}-{self.layout}"


@dataclass
class Outcome:
    """What became of a trial; it holds when there are no ``problems``."""

    trial: Trial
    met: bool = False
    """Whether the fault came before the end of the run."""
    starts: int = 0
    lost: int = 0
    """Most steps that were run again after a restart."""
    seconds: float = 0.0
    sentences: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def draw(faults: int, seed: int, kinds: list[str] | None = None) -> list[Trial]:
    """As many trials, every kind in turn; of four about two are on one rank, one on two and one on four ranks, or half of all
    on several where a kind needs them."""
    source = random.Random(seed)
    names = kinds or list(KINDS)
    trials = []
    for number in range(faults):
        kind = names[number % len(names)]
        several = [n for n, (size, _) in LAYOUTS.items() if size > 1]
        pairs, fours = [n for n in several if LAYOUTS[n][0] == 2], [n for n in several if LAYOUTS[n][0] == 4]
        layout = source.choice(["one", source.choice(pairs), source.choice([*pairs, *fours])])
        if kind in NEED_SEVERAL and layout == "one":
            layout = source.choice(several)
        trials.append(Trial(number, kind, layout, source.randrange(2**32)))
    return trials


class Campaign:
    """Runs of trials in ``folder``, on one corpus."""

    def __init__(self, folder: Path, corpus: Path):
        self._folder, self._corpus = folder, corpus
        self._calm: dict[str, Runs] = {}

    def run(self, trial: Trial) -> Outcome:
        """The whole story of a trial, told again with other moments where the fault came too late."""
        for seed in range(trial.seed, trial.seed + ATTEMPTS):
            outcome = self._run(replace(trial, seed=seed))
            if outcome.met or outcome.problems:
                return outcome
        outcome.problems.append("the fault always came too late")
        return outcome

    def _run(self, trial: Trial) -> Outcome:
        """The folder of a trial is removed where it holds."""
        folder, outcome, began = self._folder / trial.name, Outcome(trial), time.monotonic()
        folder.mkdir()
        corpus = folder / "corpus"
        shutil.copytree(self._corpus, corpus)
        place = Scene(trial, Runs(folder, corpus), random.Random(trial.seed), outcome)
        try:
            with KINDS[trial.kind](place) as meet:
                self._story(place, meet)
        except AssertionError as error:  # a job that would not end, or not begin
            outcome.problems.append(f"{str(error)[:2000]}")
        outcome.seconds = time.monotonic() - began
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome

    def _story(self, scene: Scene, meet: Callable[[Job], None]) -> None:
        trial, outcome = scene.trial, scene.outcome
        for attempt in range(ATTEMPTS):
            before, newest = scene.steps_logged(), scene.newest_whole()
            with scene.start() as job:
                outcome.starts += 1
                if attempt == 0:
                    meet(job)
                codes = job.wait_for_end(STARTING if scene.undisturbed else TIMEOUT + EXPLAINING)
                scene.check_words(job, codes)
            if before:
                resumed = scene.resumed_at()
                if resumed != newest:
                    outcome.problems.append(f"went on from step {resumed}, the newest whole checkpoint was {newest}")
                outcome.lost = max(outcome.lost, before - newest)
                if before - newest > EVERY * (1 + scene.damaged):
                    outcome.problems.append(f"{before - newest} steps are lost, a checkpoint is made every {EVERY}")
            scene.repair()
            if set(codes) == {0}:
                break
        else:
            outcome.problems.append(f"has not ended after {ATTEMPTS} starts: exit codes {codes}")
            return
        if trial.kind == "nan":
            self._compare_loosely(scene)
        else:
            self._compare(scene)

    def _compare(self, scene: Scene) -> None:
        calm = self._calm_run(scene.trial.layout)
        expected, found = calm.records("calm"), scene.records()
        if [r["step"] for r in found] != list(range(1, STEPS + 1)):
            scene.outcome.problems.append(f"metrics.jsonl has steps {[r['step'] for r in found]}")
            return
        for key in ("loss", "grad_norm", "depths", "tokens"):
            if [r[key] for r in found] != [r[key] for r in expected]:
                scene.outcome.problems.append(f"{key} differs from the undisturbed run's")
        if _digests(scene.checkpoint(STEPS)) != _digests(calm.path("calm") / "checkpoints" / f"step-{STEPS}"):
            scene.outcome.problems.append("weights or moments differ from the undisturbed run's")

    def _compare_loosely(self, scene: Scene) -> None:
        """With one process that skipped the same step."""
        name = f"nan-{scene.nan_step}"
        if name not in self._calm:
            self._calm[name] = Runs(self._folder / name, self._corpus)
            self._calm[name].folder.mkdir()
            environment = {"FAULTY_RANK": "0", "RANK": "0", "FAULTY_STEPS": str(scene.nan_step)}
            self._calm[name].train("calm", *SETTINGS, script=FAULTY_RANK, environment=environment)
        expected = load_whole(self._calm[name].path("calm") / "checkpoints" / f"step-{STEPS}")
        found = load_whole(scene.checkpoint(STEPS))
        for tensor, value in expected.items():
            if tensor.startswith("weight/") and (found[tensor] - value).norm() > 1e-5 * value.norm():
                scene.outcome.problems.append(f"{tensor} differs from that of one process that skipped the step")
        if [r["skipped"] for r in scene.records()] != [int(step > scene.nan_step) for step in range(1, STEPS + 1)]:
            scene.outcome.problems.append("the skipped steps are not the one that was bad")

    def _calm_run(self, layout: str) -> Runs:
        """An undisturbed run at ``layout``."""
        if layout not in self._calm:
            size, overrides = LAYOUTS[layout]
            self._calm[layout] = Runs(self._folder / f"calm-{layout}", self._corpus)
            self._calm[layout].folder.mkdir()
            self._calm[layout].train("calm", *SETTINGS, *overrides, ranks=size)
        return self._calm[layout]


SETTINGS = [f"train.steps={STEPS}", f"checkpoint.every={EVERY}", f"parallel.timeout={TIMEOUT}"]


class Scene:
    """A run that meets its fault."""

    def __init__(self, trial: Trial, runs: Runs, source: random.Random, outcome: Outcome):
        self.trial, self.runs, self.source, self.outcome = trial, runs, source, outcome
        self.settings, self.environment, self.script = list[str](), dict[str, str](), None
        self.undisturbed = False
        self.damaged = 0
        """Checkpoints that the fault damaged."""
        self.nan_step = -1
        self.repair: Callable[[], None] = lambda: None

    def start(self) -> Job:
        options = {"options": ["--resume", "auto"], "environment": self.environment, "script": self.script}
        return self.runs.start("run", *SETTINGS, *LAYOUTS[self.trial.layout][1], *self.settings, ranks=self.trial.size, **options)

    @property
    def path(self) -> Path:
        for setting in self.settings:
            if setting.startswith("run.folder="):
                return Path(setting.partition("=")[2]) / "run"
        return self.runs.path("run")

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"

    def records(self) -> list[dict]:
        return _records(self.path / "metrics.jsonl")

    def steps_logged(self) -> int:
        return max((r["step"] for r in self.records()), default=0)

    def resumed_at(self) -> int:
        """Step of the last start; 0 for a new beginning."""
        events = _records(self.path / "journal.jsonl")
        starts = [i for i, e in enumerate(events) if e["kind"] == "start" and "loopscale" in e["message"]]
        return max((e["step"] for e in events[starts[-1] :] if e["kind"] == "resumed"), default=0)

    def newest_whole(self) -> int:
        """Step of the newest checkpoint that is whole, by its files; 0 where there is none."""
        from loopscale.checkpoint.commit import damage, read_manifest

        for step in Folder(self.path / "checkpoints").steps():
            with contextlib.suppress(CheckpointError):
                if damage(self.checkpoint(step), read_manifest(self.checkpoint(step)).files) is None:
                    return step
        return 0

    def send(self, job: Job, rank: int, number: int) -> None:
        """A signal to a rank, if it is there to hear it."""
        self.outcome.met |= not job.has_ended(rank)
        job.ranks[rank].send_signal(number)

    def wait_for_step(self, job: Job, step: int) -> bool:
        """Whether step ``step`` has been logged before the run ended."""
        job.wait(lambda: self.steps_logged() >= step or all(map(job.has_ended, range(self.trial.size))), STARTING)
        return self.steps_logged() >= step

    def check_words(self, job: Job, codes: list[int]) -> None:
        for rank, code in enumerate(codes):
            text = job.printed(rank)
            if "Traceback" in text:
                self.outcome.problems.append(f"rank {rank} printed a traceback:\n{text[-3000:]}")
            if code in (1, 2):
                said = [line for line in text.splitlines() if "error:" in line]
                if not said:
                    self.outcome.problems.append(f"rank {rank} ended with {code} and did not say why:\n{text[-2000:]}")
                self.outcome.sentences += said[-1:]
            elif code not in (0, 75, -signal.SIGKILL):
                self.outcome.problems.append(f"rank {rank} ended with {code}:\n{text[-2000:]}")


Meeting = Iterator[Callable[[Job], None]]


@contextlib.contextmanager
def killed(scene: Scene) -> Meeting:
    """SIGKILL of any rank at any moment, the start included."""

    def meet(job: Job) -> None:
        step = scene.source.randint(0, STEPS - 1)
        if scene.wait_for_step(job, step):
            time.sleep(scene.source.uniform(0, 3.0 if step == 0 else 0.1))
        scene.send(job, scene.source.randrange(scene.trial.size), signal.SIGKILL)

    yield meet


@contextlib.contextmanager
def killed_in_save(scene: Scene) -> Meeting:
    """SIGKILL of any rank while a checkpoint is written."""

    def meet(job: Job) -> None:
        scene.wait_for_step(job, EVERY * scene.source.randint(1, 3) - 1)
        writing = (scene.path / "checkpoints").glob
        job.wait(lambda: any(writing("*.writing")) or all(map(job.has_ended, range(scene.trial.size))), STARTING)
        time.sleep(scene.source.uniform(0, 0.05))
        scene.send(job, scene.source.randrange(scene.trial.size), signal.SIGKILL)

    yield meet


@contextlib.contextmanager
def asked(scene: Scene) -> Meeting:
    """SIGTERM, SIGUSR1 or SIGUSR2 to one rank or to all."""

    def meet(job: Job) -> None:
        step = scene.source.randint(1, STEPS - 2)
        scene.wait_for_step(job, step)
        number = scene.source.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
        everyone = list(range(scene.trial.size))
        for rank in scene.source.choice([everyone, [scene.source.choice(everyone)]]):
            scene.send(job, rank, number)

    yield meet


@contextlib.contextmanager
def silent(scene: Scene) -> Meeting:
    """SIGSTOP of a rank for longer than the timeout; then it wakes up."""

    def meet(job: Job) -> None:
        scene.wait_for_step(job, scene.source.randint(1, STEPS - 3))
        rank = scene.source.randrange(scene.trial.size)
        others = [r for r in range(scene.trial.size) if r != rank]
        scene.send(job, rank, signal.SIGSTOP)
        job.wait(lambda: all(map(job.has_ended, others)), TIMEOUT + EXPLAINING)
        job.ranks[rank].send_signal(signal.SIGCONT)

    yield meet


@contextlib.contextmanager
def full_disk(scene: Scene) -> Meeting:
    """The disk that holds the run is full for a while: no room at all, or not enough for the next checkpoint."""
    disk = scene.runs.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True, capture_output=True)
    scene.settings.append(f"run.folder={disk}")
    filler = disk / "filler"

    def meet(job: Job) -> None:
        scene.wait_for_step(job, scene.source.randint(1, STEPS - 3))
        left = scene.source.choice([0, scene.source.randint(0, 600_000)])
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while shutil.disk_usage(disk).free > left:
                file.write(bytes(min(65536, shutil.disk_usage(disk).free - left)))
        full_at = scene.steps_logged()
        scene.outcome.met = not all(map(job.has_ended, range(scene.trial.size)))
        ended = partial(all, map(job.has_ended, range(scene.trial.size)))
        job.wait(lambda: scene.steps_logged() >= min(STEPS, full_at + EVERY + 1) or ended(), TIMEOUT + EXPLAINING)
        filler.unlink()

    try:
        yield meet
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@contextlib.contextmanager
def damaged(scene: Scene, how: str) -> Meeting:
    """The run is killed, and then a file of its newest checkpoint is damaged."""

    def meet(job: Job) -> None:
        scene.wait_for_step(job, scene.source.randint(EVERY + 1, STEPS - 1))
        for rank in range(scene.trial.size):
            scene.send(job, rank, signal.SIGKILL)

    def repair() -> None:
        scene.repair = lambda: None
        steps = Folder(scene.path / "checkpoints").steps()
        if len(steps) > 1:
            scene.damaged = 1
            files = [p for p in sorted(scene.checkpoint(steps[0]).rglob("*")) if p.is_file()]
            _spoil(scene.source.choice(files), how, scene.source)

    scene.repair = repair
    yield meet


@contextlib.contextmanager
def shard(scene: Scene) -> Meeting:
    """The run is killed; at the next start a file of its corpus cannot be read, at the one after that it can again."""
    lost: list[tuple[Path, bytes]] = []

    def meet(job: Job) -> None:
        scene.wait_for_step(job, scene.source.randint(1, STEPS - 1))
        for rank in range(scene.trial.size):
            scene.send(job, rank, signal.SIGKILL)

    def repair() -> None:
        if lost:
            for path, content in lost:
                path.write_bytes(content)
            scene.repair = lambda: None
            return
        for path in sorted(scene.runs.corpus.rglob("train/*.mds*")):
            if path.stat().st_size:
                lost.append((path, path.read_bytes()))
                _spoil(path, scene.source.choice(["flip", "cut", "remove"]), scene.source)

    scene.repair = repair
    yield meet


@contextlib.contextmanager
def nan(scene: Scene) -> Meeting:
    """A rank's loss is not finite at one step."""
    scene.nan_step = scene.source.choice([3, 11])
    scene.script = FAULTY_RANK
    scene.undisturbed = scene.outcome.met = True
    rank = scene.source.randrange(HOME[scene.trial.layout])
    scene.environment = {"FAULTY_RANK": str(rank), "FAULTY_STEPS": str(scene.nan_step)}
    if scene.trial.size == 1:
        scene.environment["RANK"] = "0"
    yield lambda job: None


KINDS: dict[str, Callable[[Scene], contextlib.AbstractContextManager[Callable[[Job], None]]]] = {
    "kill": killed,
    "kill-in-save": killed_in_save,
    "signal": asked,
    "silent": silent,
    "full-disk": full_disk,
    "flipped-file": partial(damaged, how="flip"),
    "cut-file": partial(damaged, how="cut"),
    "missing-file": partial(damaged, how="remove"),
    "shard": shard,
    "nan": nan,
}
NEED_SEVERAL = {"silent"}


def can_mount(folder: Path) -> bool:
    """Whether a disk of a few megabytes can be had, which needs root's rights."""
    if os.geteuid() != 0:
        return False
    place = folder / "mount"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", str(place)], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    return done.returncode == 0


def _spoil(path: Path, how: str, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    match how:
        case "flip":
            content[source.randrange(len(content))] ^= 1 << source.randrange(8)
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[: source.randrange(len(content))])
        case "remove":
            path.unlink()


def _digests(checkpoint: Path) -> dict[str, str]:
    return {name: tensor.digest for name, tensor in read_index(checkpoint).items()}


def _records(path: Path) -> list[dict]:
    """The whole lines of a file that may just be written."""
    import json

    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def table(outcomes: list[Outcome]) -> Table:
    """Counts by kind."""
    shown = Table("fault", "trials", "1 rank", "2 ranks", "4 ranks", "starts", "most steps lost", "longest s", "held")
    for kind in dict.fromkeys(o.trial.kind for o in outcomes):
        own = [o for o in outcomes if o.trial.kind == kind]
        sizes = Counter(o.trial.size for o in own)
        shown.add_row(
            kind, str(len(own)), *(str(sizes[n]) for n in (1, 2, 4)), str(sum(o.starts for o in own)),
            str(max(o.lost for o in own)), f"{max(o.seconds for o in own):.0f}", str(sum(not o.problems for o in own)),
        )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=90)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS))
    options = parser.parse_args()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    built(folder / "corpus", write_jsonl(folder / "texts.jsonl", texts(300)))
    kinds = options.kinds or [k for k in KINDS if k != "full-disk" or can_mount(folder)]
    campaign, outcomes = Campaign(folder, folder / "corpus"), list[Outcome]()
    for trial in draw(options.faults, options.seed, kinds):
        outcomes.append(campaign.run(trial))
        last = outcomes[-1]
        verdict = "; ".join(last.problems) or "held"
        told = f"{trial.name}: {last.starts} starts, {last.lost} steps lost, {last.seconds:.0f} s: {verdict}"
        for line in (told, *(f"    {sentence}" for sentence in dict.fromkeys(last.sentences))):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table(outcomes))
    failed = [o for o in outcomes if o.problems]
    if not failed:
        shutil.rmtree(folder)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
