"""The typed tree of a cluster file: what a SLURM job asks for, how its tasks start, what a node must be able to do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loopscale.config.tree import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

Lines = Annotated[tuple[str, ...], Field(strict=False)]
Variables = Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")], ...], Field(strict=False)]


class JobConfig(Section):
    nodes: PositiveInt = 1
    """Nodes that train."""
    devices: PositiveInt = 1
    """Devices of a node; each gets one task, which is one rank."""
    spares: NonNegativeInt = 0
    """Nodes asked for beyond `nodes`, for those that the preflight finds sick."""
    gpus: bool = True
    """Ask SLURM for `devices` GPUs on each node; false: the ranks compute on CPUs."""
    time: Annotated[int, Field(ge=2, le=60 * 24 * 365)] = 1440
    """Minutes that a job may run (YAML reads 24:00 as 1440); the run saves before they are up, and is queued again."""
    partition: str | None = None
    """Partition, or several with commas between; unset: the cluster's default."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclude: str | None = None
    """Nodes not to use, as node[3,7]."""
    cpus: PositiveInt | None = None
    """CPU cores of each task; unset: the cluster's default."""
    memory: PositiveFloat | None = None
    """GB of memory of a node; unset: the cluster's default."""
    exclusive: bool = True
    """Share the nodes with no other job."""
    notice: PositiveInt = 180
    """Seconds before the limit of time at which SLURM sends a signal, a second warning: runs watch the time themselves."""
    sbatch: Variables = ()
    """Further options of sbatch, as `reservation=big`."""
    srun: Lines = ()
    """Further arguments of srun, as `--cpu-bind=cores`."""


class ContainerConfig(Section):
    engine: Literal["none", "pyxis", "apptainer", "podman"] = "none"
    """What starts the image, on the nodes: enroot through srun's pyxis plugin, apptainer, podman; or no container."""
    image: str | None = None
    """The image, as the engine names it: a .sqsh or .sif file that all nodes see, or registry/name:tag."""
    mounts: Lines = ()
    """Folders to mount, as FROM:TO; the run's folder and the one that the job was started from are mounted anyway."""
    arguments: Lines = ()
    """Further arguments of the engine (pyxis: of srun)."""
    python: str = "python"
    """Python inside the image."""


class PreflightConfig(Section):
    timeout: PositiveInt = 60
    """Seconds in which all ranks must have come."""
    clock: PositiveFloat = 5.0
    """Seconds by which a node's clock may differ from rank 0's."""
    disk: NonNegativeFloat = 20.0
    """GB that must be free where the run is written."""
    shm: NonNegativeFloat = 1.0
    """GB that must be free in /dev/shm, by which processes of a node hand each other data."""
    interface: str | None = None
    """Network interface that ranks talk over, for gloo and NCCL; unset: the one that leads to the first node."""
    matmul_share: Fraction = 0.7
    """A device whose matrix products are slower than this share of the median (of three devices or more) is sick."""
    network_share: Fraction = 0.4
    """A node whose links to both neighbours are slower than this share of the median link is sick."""


class ClusterConfig(Section):
    """How a run is started under SLURM."""

    job: JobConfig = JobConfig()
    environment: Variables = ()
    """Variables of all ranks, as NCCL_DEBUG=WARN."""
    setup: Lines = ()
    """Shell lines before the ranks are started, as `module load cuda`; the first that fails ends the job."""
    retries: NonNegativeInt = 3
    """Times that a run which failed without getting to a new checkpoint is queued again. One that was preempted or whose time
    was up always is."""
    chain: PositiveInt = 1
    """Jobs that wait for each other, where a queue takes no job back: each goes on where the one before had to stop."""
    container: ContainerConfig = ContainerConfig()
    preflight: PreflightConfig = PreflightConfig()
