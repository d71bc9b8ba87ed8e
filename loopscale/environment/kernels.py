"""Whose kernels a run uses: torch's, or those that NVIDIA's extensions bring to a GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from loopscale.config.tree import Config
from loopscale.environment.doctor import apex_has_kernels, apex_state
from loopscale.errors import ConfigError, Problem


@dataclass(frozen=True)
class Kernels:
    """What was chosen, and why not the others."""

    layers: Literal["torch", "te"]
    """Linear layers and attention; te: Transformer Engine."""
    adam: Literal["torch", "apex"]
    notes: tuple[str, ...]
    """A sentence for each extension that is not used."""

    def __str__(self) -> str:
        adam = f", AdamW by {self.adam}" if self.adam != self.layers else ""
        return f"{self.layers}{adam}" + (f" ({'; '.join(self.notes)})" if self.notes else "")


def choose_kernels(config: Config, device: torch.device, compute: torch.dtype) -> Kernels:
    """The kernels of ``train.kernels`` on ``device`` for visits in ``compute``.

    Raises :class:`ConfigError` with the reason where Transformer Engine is asked for and cannot be had.
    """
    asked = config.train.kernels
    if asked == "torch":
        return Kernels("torch", "torch", ())
    against_te = _against_te(device, compute)
    if asked == "te" and against_te:
        raise ConfigError("kernels", [Problem("train.kernels", f"te cannot be had: {against_te}; use auto or torch")])
    if device.type == "cpu":
        return Kernels("torch", "torch", ())
    against_apex = _against_apex(config)
    notes = [f"no Transformer Engine: {against_te}"] if against_te else []
    notes += [f"no apex: {against_apex}"] if against_apex else []
    return Kernels("torch" if against_te else "te", "torch" if against_apex else "apex", tuple(notes))


def _against_te(device: torch.device, compute: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "it runs on GPUs alone"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer-engine is not installed"
    if compute != torch.bfloat16:
        return "its attention takes bf16, and train.precision is fp32"
    return None


def _against_apex(config: Config) -> str | None:
    if config.parallel.offload_optimizer:
        return "its AdamW runs on GPUs alone, and parallel.offload_optimizer updates on the CPU"
    if not apex_has_kernels():
        return "not installed" if apex_state() == "absent" else "what is installed has no CUDA kernels"
    return None
