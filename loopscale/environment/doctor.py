"""What this machine and installation can do: the findings behind ``loopscale doctor``.

Versions come from package metadata and package folders are looked at without importing them, which is cheap and
cannot fail half-way. Only torch is run, in a process of its own: whether its build fits the driver, and torchvision
fits torch, shows in no metadata, and a broken build may crash.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

State = Literal["ok", "missing", "wrong"]

GIB = 2**30

APEX_BUILD = (
    "build it from source where nvcc matches torch's CUDA: git clone https://github.com/NVIDIA/apex && cd apex && "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
)


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    name: str
    state: State
    found: str
    """Version, size or device; empty when missing."""
    note: str
    """What its absence costs, or how to put it right; empty when there is nothing to say."""
    required: bool = False
    """Whether training is impossible without it."""


@dataclass(frozen=True)
class _Package:
    """A distribution worth a line of its own."""

    name: str
    cost: str
    """What its absence costs."""
    required: bool = True


_PACKAGES = (
    _Package("torch", "nothing can be computed"),
    _Package("torchvision", "streaming cannot be imported, so no corpus can be read"),
    _Package("megatron-core", "there are no layers and no process groups"),
    _Package("deepspeed", "there is no ZeRO optimizer"),
    _Package("mosaicml-streaming", "no corpus can be built or read"),
    _Package("transformers", "streaming cannot be imported"),
    _Package("huggingface-hub", "transformers, and with it streaming, cannot be imported"),
    _Package("tokenizers", "no corpus can be built and no text generated"),
    _Package("wandb", "runs are tracked by metrics.jsonl and TensorBoard alone", required=False),
    _Package("submitit", "`loopscale launch` cannot hand jobs to SLURM; torchrun still works", required=False),
)
_GPU_PACKAGES = (
    _Package("triton", "no torch.compile on GPUs; nothing on a CPU", required=False),
    _Package("transformer-engine", "GPU layers run torch's own kernels and no FP8; nothing on a CPU", required=False),
    _Package("flash-attn", "attention on GPUs runs torch's own kernels; nothing on a CPU", required=False),
)

# Prints one JSON object. A product on every device shows what `is_available` does not: a build without kernels for
# this card. torchvision is imported because a build that does not fit torch fails there and nowhere else.
_TORCH_PROBE = """
import json, torch
report = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": [], "fault": None}
try:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        report["devices"].append({"name": properties.name, "memory": properties.total_memory})
        (torch.ones(2, 2, device=f"cuda:{index}") @ torch.ones(2, 2, device=f"cuda:{index}")).sum().item()
except Exception as error:
    report["fault"] = f"{type(error).__name__}: {error}".splitlines()[0]
try:
    import torchvision
    report["torchvision"] = "ok"
except Exception as error:
    report["torchvision"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(report))
"""


def examine() -> list[Finding]:
    """Look at Python, packages, kernels and machine; takes as long as torch takes to import."""
    requirements = _requirements()
    torch = probe_torch()
    return [
        _python(),
        *_packages(requirements, torch),
        _other_packages(requirements),
        _device(torch),
        *(_package(package, requirements) for package in _GPU_PACKAGES),
        _apex(),
        *_machine(),
    ]


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something required is missing or wrong, else 0."""
    return int(any(finding.required and finding.state != "ok" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """The findings for programs: ``{"ready": bool, "findings": [{name, state, found, note, required}, …]}``."""
    return json.dumps({"ready": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}, indent=2)


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings: a coloured table on a terminal, one plain line each when piped."""
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for finding in findings:
            line = f"{finding.state:<8} {finding.name:<18}  {finding.found}  {finding.note}".rstrip()
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    blocking = [finding.name for finding in findings if finding.required and finding.state != "ok"]
    verdict = f"not ready: put {', '.join(blocking)} right first" if blocking else "ready to train"
    console.print(verdict, style="bold red" if blocking else "bold green", markup=False, highlight=False, soft_wrap=True)


def _table(findings: Sequence[Finding]) -> Table:
    styles = {"ok": "green", "missing": "dim", "wrong": "yellow"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        blocks = finding.required and finding.state != "ok"
        state = Text(finding.state, style="bold red" if blocks else styles[finding.state])
        table.add_row(state, Text(finding.name, style="bold"), Text(finding.found), Text(finding.note, style="dim"))
    return table


# --- packages --------------------------------------------------------------------------------------------------------


def _requirements() -> dict[str, Requirement]:
    """What loopscale itself declares, by distribution name; extras left out. Empty when it runs from a bare copy of its code."""
    try:
        declared = [Requirement(line) for line in metadata.requires("loopscale") or []]
    except metadata.PackageNotFoundError:
        return {}
    return {each.name: each for each in declared if each.marker is None or each.marker.evaluate({"extra": ""})}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _misfit(version: str, bounds: SpecifierSet) -> str | None:
    """The way out for a version outside its bounds, or None."""
    return None if bounds.contains(version, prereleases=True) else f"loopscale needs {bounds}"


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        bounds = SpecifierSet(metadata.metadata("loopscale")["Requires-Python"])
    except metadata.PackageNotFoundError:
        bounds = SpecifierSet()
    misfit = _misfit(version, bounds)
    return Finding("python", "wrong" if misfit else "ok", version, misfit or sys.executable, required=True)


def _package(package: _Package, requirements: Mapping[str, Requirement]) -> Finding:
    version = _version(package.name)
    if version is None:
        return Finding(package.name, "missing", "", f"without it {package.cost}", package.required)
    bounds = requirements[package.name].specifier if package.name in requirements else SpecifierSet()
    if misfit := _misfit(version, bounds):
        return Finding(package.name, "wrong", version, f"{misfit}: pip install '{package.name}{bounds}'", package.required)
    return Finding(package.name, "ok", version, "", package.required)


def _packages(requirements: Mapping[str, Requirement], torch: Mapping[str, Any]) -> Iterator[Finding]:
    """The packages with a line of their own; for torch and torchvision, what running them showed counts as well."""
    for package in _PACKAGES:
        finding = _package(package, requirements)
        if finding.state == "ok" and package.name == "torch":
            finding = _torch(finding, torch)
        elif finding.state == "ok" and package.name == "torchvision":
            finding = _torchvision(finding, torch)
        yield finding


def _torch(finding: Finding, torch: Mapping[str, Any]) -> Finding:
    if "version" not in torch:
        return Finding("torch", "wrong", finding.found, f"cannot be imported: {torch['fault']}", required=True)
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
    return Finding("torch", "ok", torch["version"], f"{build} build", required=True)


def _torchvision(finding: Finding, torch: Mapping[str, Any]) -> Finding:
    outcome = torch.get("torchvision", "ok")  # with a broken torch nothing can be said of torchvision
    if outcome == "ok":
        return finding
    note = f"does not fit torch ({outcome}): install both in one command from one index, pip install torch torchvision"
    return Finding("torchvision", "wrong", finding.found, note, required=True)


def _other_packages(requirements: Mapping[str, Requirement]) -> Finding:
    """One line for all declared packages that have none of their own."""
    others = [each for name, each in requirements.items() if name not in {package.name for package in _PACKAGES}]
    faults = []
    for each in others:
        version = _version(each.name)
        if version is None:
            faults.append(f"'{each.name}{each.specifier}' (missing)")
        elif _misfit(version, each.specifier):
            faults.append(f"'{each.name}{each.specifier}' (is {version})")
    if faults:
        return Finding("other packages", "wrong", f"{len(faults)} of {len(others)}", f"pip install {' '.join(faults)}", True)
    return Finding("other packages", "ok", f"{len(others)} of {len(others)}", "", required=True)


# --- devices and kernels ---------------------------------------------------------------------------------------------


def probe_torch(timeout: float = 60.0) -> dict[str, Any]:
    """Import torch and torchvision in another process.

    Returns:
        version, cuda and hip (or None), devices [{name, memory in bytes}], fault (or None) and torchvision ("ok"
        or what was raised); only ``fault`` when torch cannot be imported.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"fault": f"its import took more than {timeout:g} s"}
    try:
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"fault": (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]}
    return report


def _device(torch: Mapping[str, Any]) -> Finding:
    has_card = Path("/dev/nvidia0").exists()
    devices = torch.get("devices", [])
    if torch.get("fault") and (devices or has_card):
        return Finding("device", "wrong", _device_names(devices), f"cannot be used: {torch['fault']}", required=True)
    if devices:
        return Finding("device", "ok", _device_names(devices), "", required=True)
    if has_card:
        cause = "its driver is older than torch's CUDA build" if torch.get("cuda") else "torch is a CPU build"
        return Finding("device", "wrong", "CPU", f"there is an NVIDIA card that torch does not see: perhaps {cause}")
    return Finding("device", "ok", "CPU", _cpu_precision())


def _device_names(devices: Sequence[Mapping[str, Any]]) -> str:
    if not devices:
        return ""
    smallest = min(device["memory"] for device in devices) / GIB
    names = " and ".join(sorted({device["name"] for device in devices}))
    return f"{len(devices)} × {names}, {smallest:.0f} GiB"


def _cpu_precision() -> str:
    flags = _read("/proc/cpuinfo")
    fast = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]
    return f"bf16 runs by {fast[0]}" if fast else "no bf16 instructions: train in fp32, bf16 would be about 100 times slower"


def apex_state() -> Literal["nvidia", "unrelated", "absent"]:
    """Which project the name ``apex`` stands for here, judged by its files; nothing is imported.

    PyPI's ``apex`` is a web-framework toolkit. NVIDIA's is told by its subpackages ``apex.optimizers`` and
    ``apex.multi_tensor_apply``. Whether its CUDA kernels were built is another question: `apex_has_kernels`.
    """
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # a module put into sys.modules by hand, without a spec
        return "unrelated"
    if spec is None:
        return "absent"
    # find_spec("apex.optimizers") would import apex, and with it whatever stands in its __init__.
    folders = list(spec.submodule_search_locations or [])
    parts = ("optimizers", "multi_tensor_apply")
    return "nvidia" if all(importlib.machinery.PathFinder.find_spec(part, folders) for part in parts) else "unrelated"


def apex_has_kernels() -> bool:
    """Whether NVIDIA's apex was built with its CUDA kernels, without which ``FusedAdam`` refuses to be made."""
    return apex_state() == "nvidia" and importlib.util.find_spec("amp_C") is not None


def _apex() -> Finding:
    match apex_state():
        case "absent":
            return Finding("apex", "missing", "", f"without it GPUs run torch's Adam and norms; to have it, {APEX_BUILD}")
        case "unrelated":
            note = f"not NVIDIA's: PyPI's apex is a web-framework toolkit. It is not used; pip uninstall apex, then {APEX_BUILD}"
            return Finding("apex", "wrong", _version("apex") or "unknown version", note)
    if not apex_has_kernels():
        return Finding("apex", "wrong", _version("apex") or "", f"has no CUDA kernels, so it is not used; {APEX_BUILD}")
    return Finding("apex", "ok", _version("apex") or "", "NVIDIA's, with CUDA kernels")


# --- machine ---------------------------------------------------------------------------------------------------------


def _machine() -> Iterator[Finding]:
    yield Finding("cores", "ok", f"{_cores():g}", "")
    memory = _memory()
    yield Finding("memory", "ok", f"{memory / GIB:.1f} GiB", f"{psutil.virtual_memory().available / GIB:.1f} GiB free now")
    yield _shared_memory()
    yield _disk(Path.cwd())


def _cores() -> float:
    """Cores this process may use: its affinity, or a container's quota where that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        return min(float(allowed), int(quota[0]) / int(quota[1]))
    return float(allowed)


def _memory() -> int:
    """Bytes of memory, or a container's limit where that is less."""
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    total: int = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def _shared_memory() -> Finding:
    """Free space of /dev/shm, which streaming's readers, gloo and NCCL share; containers give 64 MB unless told otherwise."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("/dev/shm", "missing", "", "readers and ranks on one machine cannot share memory")
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < GIB:
        return Finding("/dev/shm", "wrong", found, "want 1 GiB: docker run --shm-size=8g, or delete what dead runs left")
    return Finding("/dev/shm", "ok", found, "")


def _disk(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} GiB free"
    if usage.free < GIB:
        return Finding("disk", "wrong", found, f"too little for checkpoints in {folder}; set run.folder to a larger disk", True)
    return Finding("disk", "ok", found, str(folder), required=True)


def _read(path: str) -> str:
    """A small system file's text; empty where this system has none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
