"""Megatron-core on a machine without a GPU.

Its tensor-parallel modules write ``torch.cuda.current_device()`` where they mean "here". Only those modules get another
``torch`` to look that up in; torch itself, and what anyone else sees of it, stays as it is.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class _TorchHere(ModuleType):
    """torch, except that its current CUDA device is the CPU."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"), is_available=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def run_on_cpu() -> None:
    """Makes Megatron's tensor-parallel collectives and layers allocate on the CPU; call it before ranks share layers."""
    import megatron.core.utils as utils
    from megatron.core.tensor_parallel import layers, mappings

    here = _TorchHere("torch")
    for module in (mappings, layers, utils):
        module.torch = here
