"""Handing runs to SLURM: the snapshot that a job runs, its tasks, and the job itself."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from loopscale.cluster.ledger import FOLDER, Ledger, read_spec, write_spec
from loopscale.cluster.script import executor, script_text
from loopscale.cluster.task import Task
from loopscale.config import ClusterConfig, Config, load
from loopscale.errors import ClusterError, ConfigError, Problem, UsageError, describe_fault
from loopscale.plan.dry_run import dry_run
from loopscale.plan.layout import Layout
from loopscale.train.folder import config_text, snapshot


@dataclass(frozen=True)
class Launch:
    """Runs that one job, or one array of jobs, is to train; ``folder`` is the run's or, of several runs, the study's."""

    folder: Path
    name: str
    runs: tuple[Config, ...]
    cluster: ClusterConfig
    at_once: int | None = None
    """Jobs of an array at the same time; None: as many as SLURM lets."""

    @classmethod
    def of(cls, runs: Sequence[Config], cluster: ClusterConfig, folder: Path | None = None, at_once: int | None = None) -> Launch:
        """A single run, or the runs of the study in ``folder``."""
        if folder is None:
            (config,) = runs
            folder = Path(config.run.folder) / str(config.run.name)
        return cls(folder.absolute(), folder.name, tuple(runs), cluster, at_once)

    def describe(self) -> str:
        """The world that the job makes, and its batch script."""
        job = self.cluster.job
        made = executor(self.folder, self.name, self.cluster, self.at_once)
        world = dry_run(self.runs[0], job.nodes, job.devices, job.gpus)
        spares = f" and {job.spares} spare" if job.spares else ""
        several = f" · {len(self.runs)} runs, {self.at_once or len(self.runs)} at once" if len(self.runs) > 1 else ""
        head = f"job      {job.nodes} nodes{spares} × {job.devices} devices, a task each · {job.time} min{several}"
        return f"{head}\n{world}\n\n{script_text(made, len(self.runs))}"

    def submit(self) -> list[str]:
        """Checks the layout, takes the snapshot, and submits; returns the jobs' names. Raises :class:`UsageError` where one of
        the runs has been started already, :class:`ClusterError` where SLURM refuses the job."""
        for config in self.runs:
            Layout.of(config, self.cluster.job.nodes, self.cluster.job.devices)  # or it raises
            folder = self._folder(config)
            if (folder / "config.yaml").exists() or (folder / FOLDER / "spec.json").exists():
                raise UsageError(f"{folder} already holds a run; `loopscale launch requeue {folder}` goes on with it")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"run.folder is {config.run.folder}, which cannot be written: {describe_fault(error)}") from None
        try:
            snapshot(self.folder)
            return submit([self._prepared(config) for config in self.runs], self.name, self.cluster, self.at_once)
        except BaseException:  # nothing was started: the same command is to work when what was wrong is mended
            for folder in {self.folder, *map(self._folder, self.runs)}:
                for part in (FOLDER, "code"):
                    shutil.rmtree(folder / part, ignore_errors=True)
            _drop_if_empty([*map(self._folder, self.runs), self.folder])
            raise

    def _folder(self, config: Config) -> Path:
        return Path(config.run.folder).absolute() / str(config.run.name)

    def _prepared(self, config: Config) -> Task:
        """Writes what the run's job reads."""
        folder, token = self._folder(config), uuid.uuid4().hex
        config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(folder.parent)})})
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / FOLDER / "config.yaml").write_text(config_text(config))
        (folder / FOLDER / "token").write_text(token)
        _write_cluster(folder, self.cluster)
        arguments = (str(folder / FOLDER / "config.yaml"), "--resume", "auto")
        task = Task(str(self.folder), str(folder), arguments, self.cluster.model_dump(mode="json"), token, config.train.max_time)
        write_spec(folder, {"task": asdict(task), "name": self.name, "command": sys.argv, "steps": config.train.steps})
        return task


def _drop_if_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def named(config: Config, stem: str) -> Config:
    """``config`` with a name for its run: the one that it has, or its file's and the time."""
    name = config.run.name or f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def submit(tasks: Sequence[Task], name: str, cluster: ClusterConfig, at_once: int | None = None) -> list[str]:
    """Submits a job, or an array of them, and with ``chain`` those that wait for it."""
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here: this machine belongs to no SLURM cluster; `loopscale launch local` needs none")
    launched = Path(tasks[0].launched)
    made = executor(launched, name if cluster.chain == 1 else f"{name}-{tasks[0].token[:6]}", cluster, at_once)
    if cluster.chain > 1:
        made.update_parameters(dependency="singleton")
    checked = subprocess.run(["bash", "-n"], input=script_text(made, len(tasks)), text=True, capture_output=True)
    if checked.returncode:
        problem = Problem("setup", f"is no shell text: {checked.stderr.splitlines()[0].removeprefix('bash: ')}")
        raise ConfigError("cluster file", [problem])
    try:
        rounds = [made.submit_array(list(tasks)) for _ in range(cluster.chain)]
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"SLURM refuses the job: {_said(error)}") from None
    except Exception as error:  # submitit's own
        if type(error).__module__.split(".")[0] != "submitit":
            raise
        raise ClusterError(f"SLURM refuses the job: {_reason(str(error))}") from None
    for task, jobs in zip(tasks, zip(*rounds, strict=True), strict=True):
        for job in jobs:
            Ledger(Path(task.run)).write("submitted", job.job_id, by=getpass.getuser())
    return [job.job_id for jobs in rounds for job in jobs]


def again(run: Path, overrides: Sequence[str] = ()) -> str:
    """Submits a run that has no job any more, with the snapshot and the settings that it was launched with, but for
    ``overrides`` of its cluster file; returns the job."""
    spec = read_spec(run)
    cluster = load(ClusterConfig, run / FOLDER / "cluster.yaml", overrides).config
    Layout.of(load(Config, run / FOLDER / "config.yaml").config, cluster.job.nodes, cluster.job.devices)  # or it raises
    task = Task(**{**spec["task"], "train": tuple(spec["task"]["train"]), "cluster": cluster.model_dump(mode="json")})
    (job,) = submit([task], spec["name"], cluster)[:1]
    _write_cluster(run, cluster)
    return job


def _write_cluster(run: Path, cluster: ClusterConfig) -> None:
    (run / FOLDER / "cluster.yaml").write_text(config_text(cluster))


def _said(error: subprocess.CalledProcessError) -> str:
    return _reason((error.stderr or error.output or b"").decode(errors="replace") or str(error))


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [text]
    return next((line for line in lines if "error" in line.lower()), lines[-1])
