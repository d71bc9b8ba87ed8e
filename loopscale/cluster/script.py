"""The batch script of a job, made by submitit around the lines that are ours."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from loopscale.cluster.ledger import FOLDER
from loopscale.config.cluster import ClusterConfig
from loopscale.train.limit import JOB_BEGAN


class Executor(SlurmExecutor):
    """Writes batch scripts on machines without SLURM, too."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def executor(launched: Path, name: str, cluster: ClusterConfig, at_once: int | None = None) -> Executor:
    """What submits tasks of the run or study in ``launched``, ``at_once`` of an array's together."""
    job = cluster.job
    made = Executor(launched / FOLDER / "logs", max_num_timeout=1 << 30, python=_python(launched, cluster))
    asked = {
        "nodes": job.nodes + job.spares, "ntasks_per_node": job.devices, "gpus_per_node": job.devices if job.gpus else None,
        "time": job.time, "partition": job.partition, "account": job.account, "qos": job.qos, "constraint": job.constraint,
        "exclude": job.exclude, "cpus_per_task": job.cpus, "mem": f"{round(1000 * job.memory)}M" if job.memory else None,
        "exclusive": job.exclusive or None, "signal_delay_s": job.notice, "job_name": name, "array_parallelism": at_once,
    }  # fmt: skip
    further = dict(option.split("=", 1) for option in job.sbatch)
    made.update_parameters(
        **{key: value for key, value in asked.items() if value is not None}, wckey=None,
        additional_parameters={("requeue" if cluster.chain == 1 else "no-requeue"): True, **further},
        setup=_setup(launched, cluster), teardown=_teardown(launched, cluster), srun_args=_srun(launched, cluster),
    )  # fmt: skip
    return made


def _setup(launched: Path, cluster: ClusterConfig) -> list[str]:
    ends = shlex.quote(str(launched / FOLDER / "ends"))
    exports = [f"export {name}={shlex.quote(value)}" for name, _, value in (v.partition("=") for v in cluster.environment)]
    lines = [f"line={shlex.quote(line)}\n{{ :; {line}\n}} || failed" for line in cluster.setup]
    return [
        "start=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
        f"ends={ends}",
        'failed() { trap - EXIT; mkdir -p "$ends"; echo "setup failed: $line" | tee "$ends/$start.batch" >&2; exit 1; }',
        "trap failed EXIT",
        f"export {JOB_BEGAN}=$(date +%s)",
        *exports,
        *lines,
        "trap - EXIT",
        f"export PYTHONPATH={shlex.quote(str(launched / 'code'))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1  # the snapshot, not the folder that the job starts in",
    ]


def _teardown(launched: Path, cluster: ClusterConfig) -> list[str]:
    """A task leaves a mark where its job is to be queued again; here is scontrol, wherever tasks run. In a chain the next job
    goes on by itself; the end of the run ends the chain."""
    notes, attempt = shlex.quote(str(launched / FOLDER)), "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    again = f"{notes}/requeue-{attempt}"
    if cluster.chain > 1:
        others = 'scancel --user="$USER" --name="$SLURM_JOB_NAME" --state=PENDING'
        return ["code=$?", f"[ -e {again} ] || {others}", "exit $code"]
    return [
        "code=$?",
        "# a start that ended without a word, all its tasks killed, is retried, too",
        f"if [ $code -ne 0 ] && [ -e {notes}/began-{attempt} ] && [ ! -e {notes}/ended-{attempt} ]; then touch {again}; fi",
        f"if [ -e {again} ]; then",
        '  scontrol requeue "$SLURM_JOB_ID" && sleep 600  # which ends this script',
        '  mkdir -p "$ends"; echo "SLURM takes the job back by no scontrol requeue" > "$ends/$start.batch"',
        "fi",
        "exit $code",
    ]


def _mounts(launched: Path, cluster: ClusterConfig) -> list[str]:
    here = os.getcwd()
    return list(dict.fromkeys([f"{here}:{here}", f"{launched}:{launched}", *cluster.container.mounts]))


def _srun(launched: Path, cluster: ClusterConfig) -> list[str]:
    """A task that fails does not end the others: they find out, and say, who it was."""
    cpus = [f"--cpus-per-task={cluster.job.cpus}"] if cluster.job.cpus else []  # since 22.05 srun does not take it from sbatch
    arguments = ["--kill-on-bad-exit=0", *cpus, *cluster.job.srun]
    if cluster.container.engine == "pyxis":
        mounts = ",".join(_mounts(launched, cluster))
        arguments += [
            f"--container-image={cluster.container.image}", f"--container-mounts={mounts}", f"--container-workdir={os.getcwd()}",
            *cluster.container.arguments,
        ]  # fmt: skip
    return arguments


def _python(launched: Path, cluster: ClusterConfig) -> str:
    """The command that starts Python on a node, as shell text."""
    container, here = cluster.container, os.getcwd()
    if container.engine == "none":
        return shlex.quote(sys.executable)
    if container.engine == "pyxis":
        return shlex.quote(container.python)
    assert container.image is not None
    mounts = _mounts(launched, cluster)
    if container.engine == "apptainer":
        binds = [part for mount in mounts for part in ("--bind", mount)]
        gpus = ["--nv"] if cluster.job.gpus else []
        words = ["apptainer", "exec", *gpus, "--pwd", here, *binds, *container.arguments, container.image, container.python]
    else:
        volumes = [part for mount in mounts for part in ("--volume", mount)]
        gpus = ["--device", "nvidia.com/gpu=all"] if cluster.job.gpus else []
        shared = ["--network", "host", "--uts", "host", "--ipc", "host", "--env-host", "--entrypoint", ""]
        words = ["podman", "run", "--rm", *shared, "--workdir", here, *gpus, *volumes, *container.arguments, container.image,
                 container.python]  # fmt: skip
    return shlex.join(words)


def script_text(made: Executor, tasks: int) -> str:
    """The batch script of ``tasks`` runs, an array if there are several."""
    array: dict[str, Any] = {"map_count": tasks} if tasks > 1 else {}
    return _make_sbatch_string(command=made._submitit_command_str, folder=made.folder, **made.parameters, **array)
