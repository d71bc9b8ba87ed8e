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
_MARGIN = 0.9
"""Share of the memory at hand that a prediction may fill."""
_IN_ALL = {"peak": "in all"}
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
    stage = max(local_stages, key=lambda s: predicted[s].peak)
    if planned.device.type == "cuda":
        needed, free, what = predicted[stage].peak, torch.cuda.get_device_properties(planned.device).total_memory, "the GPU has"
        of, room = "a rank", free
    else:
        needed, free, what = sum(predicted[s].peak for s in local_stages), psutil.virtual_memory().available, "are free"
        of = "this process" if len(local_stages) == 1 else f"the {len(local_stages)} ranks of this machine together"
        room = free * predicted[stage].peak // max(needed, 1)
    if needed > free:
        kind = _largest(predicted[stage])
        raise UsageError(
            f"{of} will need {_amount(needed)}, and {_amount(free)} {what}; most of it is {_named(kind)}, "
            f"{_amount(_size(predicted[stage], kind))} of a rank of stage {stage}. {_advice(planned, stage, kind, room)}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a class of its own for GPUs alone."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in _SIGNS)


def explain(
    error: BaseException, planned: Planned, *, rank: int, stage: int, doing: str, now: Mapping[str, int], in_step: bool = True,
) -> OutOfMemory:  # fmt: skip
    """What to tell of ``error``, met by ``rank`` of ``stage`` while ``doing`` something with ``now`` bytes by kind in memory
    (none are known where the model was still being built), ``in_step`` or beside it."""
    predicted = planned.predict()[stage]
    expected = predicted.measurable()
    asked = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    held = ", ".join(f"{_IN_ALL.get(k, k)} {_amount(now[k])} ({_amount(expected[k])})" for k in KINDS if now.get(k))
    said = f"rank {rank} (stage {stage}) ran out of memory while {doing}"
    said += f", for want of {_readable(asked[1])}" if asked else ""
    said += f"; it held (predicted at most): {held}" if held else ""
    if not in_step:
        return OutOfMemory(f"{said}. This is beside what a step needs, {_amount(expected['peak'])}: leave more memory free")
    grown = [kind for kind in now if kind != "peak" and now[kind] > _BEYOND * expected[kind] > 0]
    kind = max(grown, key=lambda k: now[k] - expected[k], default=_largest(predicted))
    part = "have grown beyond their part" if grown else "are the largest part"
    said += f"; of the {_amount(expected['peak'])} predicted, {_named(kind)} {part}"
    return OutOfMemory(f"{said}. {_advice(planned, stage, kind, now.get('peak', expected['peak']))}")


def _readable(amount: str) -> str:
    """torch's "4294967296 bytes" in GiB; what it says in words stays."""
    number, unit = amount.split()
    return _amount(float(number)) if unit == "bytes" else amount


def _amount(size: float) -> str:
    """As "1.38 GiB", "1,380 GiB" or "12 MiB"."""
    value, unit = (size / GIB, "GiB") if size >= 0.1 * GIB else (size / 2**20, "MiB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _size(memory: Memory, kind: str) -> int:
    size: int = getattr(memory, kind)
    return size


def _largest(memory: Memory) -> str:
    return max(("parameters", "gradients", "optimizer", "activations", "logits", "update"), key=lambda k: _size(memory, k))


def _named(kind: str) -> str:
    return {"optimizer": "the optimizer's states", "update": "the update's copies of gradients"}.get(kind, kind)


def _advice(planned: Planned, stage: int, kind: str, room: int) -> str:
    """The settings by which a rank of ``stage`` would need no more than ``room``, those that change ``kind`` before all
    others: any one of them where one is enough, else several together."""
    others = (change for other, changes in _CHANGES.items() if other != kind for change in changes)
    changes = list(dict.fromkeys([*_CHANGES[kind], *others]))
    room = int(_MARGIN * room)
    enough = [found for change in changes if (found := _first_that_fits(planned, stage, change, room))]
    if enough:
        return f"To need less, set {', or '.join(f'{text} (then {_amount(peak)})' for text, peak in enough[:3])}"
    together, peak = list[str](), _peak(planned, stage)
    for change in changes:
        tried = [(_peak(other, stage), text, other) for text, other in change(planned)]
        best = min(tried, key=lambda each: each[0], default=None)
        if best is not None and best[0] < 0.99 * peak:
            peak, planned = best[0], best[2]
            together.append(best[1])
            if peak <= room:
                return f"To need less, set {' and '.join(together)} (then {_amount(peak)})"
    least = f": with {' and '.join(together)} it would still need {_amount(peak)}" if together else ""
    return f"No setting is enough{least}; use a smaller model, or a machine with more memory"


Change = Callable[[Planned], "Iterator[tuple[str, Planned]]"]
"""A setting with values that could help, the mildest first, each with what the run then is."""


def _first_that_fits(planned: Planned, stage: int, change: Change, room: int) -> tuple[str, int] | None:
    """The mildest value of a setting that is enough, and the predicted peak then."""
    before = _peak(planned, stage)
    fitting = ((text, peak) for text, other in change(planned) if (peak := _peak(other, stage)) <= min(room, 0.99 * before))
    return next(fitting, None)


def _peak(planned: Planned, stage: int) -> int:
    return planned.predict()[stage].peak


def _microbatch(planned: Planned) -> Iterator[tuple[str, Planned]]:
    batch, size = planned.batch, planned.batch.microbatch
    for smaller in (n for n in range(size // 2, 0, -1) if size % n == 0):
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
    while visits > 1 and config.model.inject != "none":
        visits //= 2
        yield f"depth.backprop={visits}", planned.changed("depth", backprop=visits)


def _loss_chunk(planned: Planned) -> Iterator[tuple[str, Planned]]:
    now = min(planned.config.train.loss_chunk, planned.batch.microbatch * planned.config.corpus.sequence_length)
    if now >= 8:
        yield f"train.loss_chunk={now // 4}", planned.changed("train", loss_chunk=now // 4)


def _zero(planned: Planned) -> Iterator[tuple[str, Planned]]:
    config = planned.config
    if config.optimizer.name == "adamw" and not config.parallel.zero and planned.batch.data_parallel > 1:
        yield "parallel.zero=1", planned.changed("parallel", zero=1)


def _offload_optimizer(planned: Planned) -> Iterator[tuple[str, Planned]]:
    parallel = planned.config.parallel
    if planned.device.type == "cuda" and parallel.zero == 1 and not parallel.offload_optimizer:
        yield "parallel.offload_optimizer=true", planned.changed("parallel", offload_optimizer=True)


def _tensor(planned: Planned) -> Iterator[tuple[str, Planned]]:
    model, more = planned.config.model, 2 * planned.config.parallel.tensor
    divided = (model.heads, model.key_value_heads, model.ffn_size)
    if planned.device.type == "cuda" and planned.config.optimizer.name == "adamw" and not any(size % more for size in divided):
        yield f"parallel.tensor={more}", planned.changed("parallel", tensor=more)


def _pipeline(planned: Planned) -> Iterator[tuple[str, Planned]]:
    config, more = planned.config, len(planned.ring.slices) + 1
    enough_layers = more <= config.model.core_layers + 1
    if planned.device.type == "cuda" and enough_layers and config.objective.kind != "exit_gate_stage2":
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
