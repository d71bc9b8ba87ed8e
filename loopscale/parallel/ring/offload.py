"""Activations that wait for their backward in CPU memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Kept = tuple[torch.device, Tensor]


def waiting_on_cpu() -> saved_tensors_hooks:
    """A context in which autograd keeps a copy of what it saves in (pinned) CPU memory, and brings it back when asked for.

    Leaves and views of them stay where they are: parameters, and the inputs that the executor holds anyway.
    """
    return saved_tensors_hooks(_keep, _bring_back)


def _keep(tensor: Tensor) -> Kept:
    whole = tensor if tensor._base is None else tensor._base
    if whole.is_leaf and whole.requires_grad:
        return tensor.device, tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def _bring_back(kept: Kept) -> Tensor:
    device, tensor = kept
    return tensor.to(device, non_blocking=True)
