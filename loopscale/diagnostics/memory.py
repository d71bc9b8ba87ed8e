"""What a rank's memory holds, in bytes by kind.

    parameters      fp32, with the padding of ZeRO's flat copy of them
    gradients       those of a whole step
    optimizer       ZeRO's fp32 master part and the moments, where they lie on the device
    optimizer_cpu   the same in CPU memory, with ``parallel.offload_optimizer`` on a GPU
    buffers         what else stays: registered buffers, the rotary table, Megatron's and ZeRO's own
    activations     what steps add to all that, at most: graphs, states, logits, messages, copies of gradients
    peak            the most that was held at once

On a GPU the peak is that of torch's allocator. On a CPU it is the process's resident memory, less what the process held
before the model was built: the interpreter and its libraries. Freed pieces that malloc has not given back count there, up to
several times what is in use where messages and recomputed layers of a few MB come and go (MALLOC_MMAP_THRESHOLD_=65536 in
the environment makes malloc give them back).
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from loopscale.parallel.zero import ZeroOptimizer

KINDS = ("parameters", "gradients", "optimizer", "optimizer_cpu", "buffers", "activations", "peak")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def held(stage: nn.Module, tables: Sequence[Tensor], optimizer: ZeroOptimizer) -> dict[str, int]:
    """Bytes by kind that stay between steps, each storage counted once; of the gradients, those that the last step had.

    ``tables``: what the stage keeps beside parameters and registered buffers.
    """
    from megatron.core import parallel_state

    parameters = list(stage.parameters())
    here = parameters[0].device.type
    state = list(optimizer.state_tensors())
    others = [*stage.buffers(), *tables, *parallel_state.get_global_memory_buffer().buffer.values(), *optimizer.buffers()]
    return {
        "parameters": _bytes(parameters),
        "gradients": optimizer.gradient_bytes,
        "optimizer": _bytes(t for t in state if t.device.type == here),
        "optimizer_cpu": _bytes(t for t in state if t.device.type != here),
        "buffers": _bytes(t for t in others if t.device.type == here),
    }


def by_kind(held: Mapping[str, int], peak: int) -> dict[str, int]:
    """All kinds, of what stays and the most that was held at once."""
    stays = sum(size for kind, size in held.items() if kind != "optimizer_cpu")
    return {**held, "activations": max(peak - stays, 0), "peak": peak}


class Heaviest:
    """The rank that has held most so far, and what."""

    def __init__(self) -> None:
        self.rank, self.kinds = 0, dict[str, int]()

    def see(self, ranks: Sequence[dict[str, int]]) -> None:
        """Takes the kinds of all ranks."""
        rank = max(range(len(ranks)), key=lambda r: ranks[r]["peak"])
        if not self.kinds or ranks[rank]["peak"] > self.kinds["peak"]:
            self.rank, self.kinds = rank, ranks[rank]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


class PeakMemory:
    """The most that this process has held on ``device`` since a window began, in bytes; made before the model is."""

    def __init__(self, device: torch.device):
        self._device, self._seen = device, 0
        self._before = 0 if device.type == "cuda" else psutil.Process().memory_info().rss
        self.begin()

    def begin(self) -> None:
        """Begins a window."""
        self._seen = 0
        self._reset()

    def read(self) -> int:
        """The most of the window so far."""
        self._seen = max(self._seen, self._high())
        return self._seen

    def now(self) -> int:
        """What is held now."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return max(psutil.Process().memory_info().rss - self._before, 0)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A time that the window leaves out."""
        self.read()
        yield
        self._reset()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # not Linux, or not allowed: then the window begins with the process
                _CLEAR.write_text("5")

    def _high(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(_high_water_mark() - self._before, 0)


def _high_water_mark() -> int:
    """The most that this process has had in memory."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
