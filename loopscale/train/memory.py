"""Whether a run's memory suffices, and what to change where it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from loopscale.config import Batch, Config
from loopscale.diagnostics.memory import KINDS
from loopscale.errors import OutOfMemory, UsageError
from loopscale.model.flops import count
from loopscale.model.memory import Memory, predict_memory
from loopscale.model.ring import Ring

GIB = 2**30
_BEYOND = 1.1
"""A kind that takes this much of what was predicted has grown beyond it."""
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Planned:
    """All that the prediction of a run's memory depends on."""

    config: Config
    batch: Batch
    ring: Ring
    device: torch.device
    compute: torch.dtype

    def predict(self) -> list[Memory]:
        """By stage, home first."""
        return predict_memory(self.config, self.batch, self.ring, self.device, self.compute)

    def changed(self, section: str, **values: Any) -> Planned:
        """The same with other values in a section of the configuration."""
        own = getattr(self.config, section).model_copy(update=values)
        config = self.config.model_copy(update={section: own})
        return replace(self, config=config, ring=Ring.of(config, count(config.model, config.corpus.sequence_length)))


def check_fits(planned: Planned, local_stages: list[int]) -> None:
    """Raises :class:`UsageError` where the predicted peak of the ranks on this machine, one of each of ``local_stages``, is
    more than its free memory, or that of one is more than a GPU has."""
    predicted = planned.predict()
    if planned.device.type == "cuda":
        free, what = torch.cuda.get_device_properties(planned.device).total_memory, "the GPU has"
        needed = max(predicted[s].peak for s in local_stages)
        of = "a rank"
    else:
        free, what = psutil.virtual_memory().available, "are free"
        needed = sum(predicted[s].peak for s in local_stages)
        of = f"the {len(local_stages)} rank(s) of this machine"
    if needed <= free:
        return
    stage = max(local_stages, key=lambda s: predicted[s].peak)
    kind = _largest(predicted[stage])
    raise UsageError(
        f"{of} will need {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB {what}; most of it is {_named(kind)}, "
        f"{_size(predicted[stage], kind) / GIB:,.1f} GiB of a rank of stage {stage}. {_advice(planned, stage, kind)}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a class of its own for GPUs alone."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in _SIGNS)


def explain(
    error: BaseException, planned: Planned, *, rank: int, stage: int, doing: str, now: Mapping[str, int],
) -> OutOfMemory:  # fmt: skip
    """What to tell of ``error``, met by ``rank`` of ``stage`` while ``doing`` something with ``now`` bytes by kind in memory
    (none are known where the model was still being built)."""
    predicted = planned.predict()[stage]
    expected = predicted.measurable()
    grown = [kind for kind in now if kind != "peak" and now[kind] > _BEYOND * expected[kind] > 0]
    kind = max(grown, key=lambda k: now[k] - expected[k], default=_largest(predicted))
    named = {"peak": "in all"}
    held = ", ".join(
        f"{named.get(kind, kind)} {now[kind] / GIB:.3g} ({expected[kind] / GIB:.3g})" for kind in KINDS if now.get(kind)
    )
    asked = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    return OutOfMemory(
        f"rank {rank} (stage {stage}) ran out of memory while {doing}"
        + (f", for want of {_readable(asked[1])}" if asked else "")
        + (f"; it held, in GiB (predicted at most): {held}" if held else "")
        + f"; of the {expected['peak'] / GIB:.3g} GiB predicted, {_named(kind)} "
        + ("have grown beyond their part" if grown else "are the largest part")
        + f". {_advice(planned, stage, kind)}"
    )


def _readable(amount: str) -> str:
    """torch's "4294967296 bytes" in GiB; what it says in words stays."""
    number, unit = amount.split()
    return f"{float(number) / GIB:.3g} GiB" if unit == "bytes" else amount


def _size(memory: Memory, kind: str) -> int:
    size: int = getattr(memory, kind)
    return size


def _largest(memory: Memory) -> str:
    return max(("parameters", "gradients", "optimizer", "activations", "logits", "update"), key=lambda k: _size(memory, k))


def _named(kind: str) -> str:
    return {"optimizer": "the optimizer's states", "update": "the update's copies of gradients"}.get(kind, kind)


def _advice(planned: Planned, stage: int, kind: str) -> str:
    """The settings that lower the predicted peak of ``stage``, those that change ``kind`` before all others."""
    before = planned.predict()
    own = _helpful(planned, before, stage, _CHANGES[kind])
    others = (change for other, changes in _CHANGES.items() if other != kind for change in changes)
    found = own or _helpful(planned, before, stage, list(dict.fromkeys(others)))
    if not found:
        return "No setting makes it smaller; use a smaller model, or a machine with more memory"
    return f"To make it smaller, set {', or '.join(f'{text} (then {peak / GIB:.3g} GiB)' for text, peak in found)}"


Change = Callable[[Planned], "Iterator[tuple[str, Planned]]"]
"""A setting with values that could help, the mildest first, each with what the run then is."""


def _helpful(planned: Planned, before: list[Memory], stage: int, changes: list[Change]) -> list[tuple[str, int]]:
    """(setting, predicted peak then) of each change at the first value that lowers the peak of ``stage`` by a hundredth."""
    found = []
    for change in changes:
        for text, other in change(planned):
            after = other.predict()
            peak = after[stage].peak if len(after) == len(before) else max(m.peak for m in after)
            if peak < 0.99 * before[stage].peak:
                found.append((text, peak))
                break
    return found


def _microbatch(planned: Planned) -> Iterator[tuple[str, Planned]]:
    batch, size = planned.batch, planned.batch.microbatch
    smaller = next((n for n in range(size // 2, 0, -1) if size % n == 0), None)
    if smaller:
        cut = replace(batch, microbatch=smaller, accumulation=batch.accumulation * size // smaller)
        yield f"batch.microbatch={smaller}", replace(planned, batch=cut)


def _in_flight(planned: Planned) -> Iterator[tuple[str, Planned]]:
    now = min(planned.ring.in_flight, planned.batch.accumulation)
    while len(planned.ring.slices) > 1 and now > 1:  # the plan may keep less than it is allowed to
        now //= 2
        yield f"parallel.in_flight={now}", replace(planned, ring=replace(planned.ring, in_flight=now))


def _recompute(planned: Planned) -> Iterator[tuple[str, Planned]]:
    order = ("none", "layer", "visit")
    for stronger in order[order.index(planned.config.train.recompute) + 1 :]:
        yield f"train.recompute={stronger}", planned.changed("train", recompute=stronger)


def _offload_activations(planned: Planned) -> Iterator[tuple[str, Planned]]:
    train = planned.config.train
    if planned.device.type == "cuda" and not train.offload_activations and train.recompute != "visit":
        yield "train.offload_activations=true", planned.changed("train", offload_activations=True)


def _backprop(planned: Planned) -> Iterator[tuple[str, Planned]]:
    config = planned.config
    visits = config.depth.gradient_visits(config.depth.deepest)
    if visits > 1 and config.model.inject != "none":
        yield f"depth.backprop={visits // 2}", planned.changed("depth", backprop=visits // 2)


def _loss_chunk(planned: Planned) -> Iterator[tuple[str, Planned]]:
    now = min(planned.config.train.loss_chunk, planned.batch.microbatch * planned.config.corpus.sequence_length)
    if now >= 8:
        yield f"train.loss_chunk={now // 4}", planned.changed("train", loss_chunk=now // 4)


def _zero(planned: Planned) -> Iterator[tuple[str, Planned]]:
    config, batch = planned.config, planned.batch
    if config.optimizer.name != "adamw":
        return
    if not config.parallel.zero and batch.data_parallel > 1:
        yield "parallel.zero=1", planned.changed("parallel", zero=1)
    elif config.parallel.zero and not config.parallel.offload_optimizer and batch.group_per_rank % 2 == 0:
        more = replace(batch, data_parallel=2 * batch.data_parallel, accumulation=max(1, batch.accumulation // 2))
        yield f"{more.data_parallel} replicas, on as many times the ranks", replace(planned, batch=more)


def _offload_optimizer(planned: Planned) -> Iterator[tuple[str, Planned]]:
    parallel = planned.config.parallel
    if planned.device.type == "cuda" and parallel.zero == 1 and not parallel.offload_optimizer:
        yield "parallel.offload_optimizer=true", planned.changed("parallel", offload_optimizer=True)


def _tensor(planned: Planned) -> Iterator[tuple[str, Planned]]:
    model, more = planned.config.model, 2 * planned.config.parallel.tensor
    divided = (model.heads, model.key_value_heads, model.ffn_size)
    if planned.config.optimizer.name == "adamw" and not any(size % more for size in divided):
        yield f"parallel.tensor={more}", planned.changed("parallel", tensor=more)


def _pipeline(planned: Planned) -> Iterator[tuple[str, Planned]]:
    config, more = planned.config, len(planned.ring.slices) + 1
    if more <= config.model.core_layers + 1 and config.objective.kind != "exit_gate_stage2":
        yield f"parallel.pipeline={more}", planned.changed("parallel", pipeline=more, slices="even")


_CHANGES: dict[str, list[Change]] = {
    "activations": [_microbatch, _in_flight, _recompute, _offload_activations, _backprop],
    "logits": [_loss_chunk, _microbatch],
    "optimizer": [_zero, _offload_optimizer, _tensor, _pipeline],
    "update": [_tensor, _pipeline],
    "parameters": [_tensor, _pipeline],
    "gradients": [_tensor, _pipeline],
    "buffers": [_microbatch],
    "optimizer_cpu": [_tensor, _pipeline],
}
