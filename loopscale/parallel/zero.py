"""AdamW with its state divided over data-parallel ranks by DeepSpeed ZeRO.

Gradient ownership: a shared weight is used once per visit, and hooks that fire per use would reduce its gradient too
early. So DeepSpeed never sees the model. It owns twins of the parameters, which share their storage but take part in
no graph; the model's own parameters collect the gradients of a whole step, and each is handed over once, in
:meth:`ZeroOptimizer.step`. Options that assume hooks (overlapped communication, contiguous gradients) are off.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from loopscale.config.tree import OptimizerConfig
from loopscale.parallel.buckets import BUCKET
from loopscale.parallel.mesh import sum_over_replica, sum_over_tensor_ranks


class ZeroOptimizer:
    """Steps ``parameters`` (name -> parameter), all fp32 on one device, as ``config`` says.

    ``kinds`` names what each parameter is (see ``model/weights.py``): it decides on decay and, under Muon, on the
    optimizer. DeepSpeed averages gradients over data-parallel ranks, so a loss that is divided by the global number of
    tokens must be multiplied by the number of those ranks.

    Of those ``divided`` each tensor-parallel rank has a share; the others are the same on all of these ranks and count
    once in the norm. With ``partial`` each of these ranks has only a part of the others' gradient, which is added up first.
    With ``offload`` (ZeRO 1) the state lies in CPU memory and the update runs there.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        kinds: Mapping[str, str],
        config: OptimizerConfig,
        zero_stage: int,
        *,
        divided: Collection[str] = (),
        partial: bool = False,
        offload: bool = False,
        adam: Literal["torch", "apex"] = "torch",
    ):
        self._parameters, self._clip, self._zero_stage, self._partial = dict(parameters), config.clip, zero_stage, partial
        self._twins = {name: nn.Parameter(p.data) for name, p in self._parameters.items()}
        for name, twin in self._twins.items():
            twin.tensor_model_parallel = name in divided  # type: ignore[attr-defined]  # DeepSpeed's norm asks for it
        self._by_muon = {n for n in self._twins if config.name == "muon" and kinds[n] == "matrix"}
        self._optimizer = self._build(kinds, config, adam)
        self._grad_norm = math.nan
        self.gradient_bytes = 0
        """Of the last step's gradients."""
        if zero_stage == 0:
            self._optimizer.register_step_pre_hook(self._clip_reduced)
        self._engine = _initialize(nn.ParameterList(self._twins.values()), self._optimizer, zero_stage, config.clip, offload)
        self._share_storage()
        self.applied_steps = 0

    def step(self, rate: float) -> float:
        """Reduces, clips and applies the gradients collected in the parameters, and clears them; returns their norm.

        ``rate`` is the learning rate as a share of its peak.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["peak"]
        if self._partial:
            self._add_up_parts()
        self.gradient_bytes = sum(p.grad.nbytes for p in self._parameters.values() if p.grad is not None)
        for name, parameter in self._parameters.items():
            self._twins[name].grad, parameter.grad = parameter.grad, None
        self._engine.step()
        for twin in self._twins.values():
            twin.grad = None
        self.applied_steps += 1
        return self._grad_norm if self._zero_stage == 0 else float(self._engine.get_global_grad_norm())

    def drop_gradients(self) -> None:
        """Forgets the collected gradients: a step that is skipped."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @property
    def divides_moments(self) -> bool:
        """Whether each of the data-parallel ranks has a part of the moments; else all have all."""
        return self._zero_stage == 1

    def moment_names(self) -> dict[str, list[str]]:
        """{moment: names of the parameters that have it}."""
        by_adam = [n for n in self._twins if n not in self._by_muon]
        names = {"exp_avg": by_adam, "exp_avg_sq": by_adam, "momentum_buffer": [n for n in self._twins if n in self._by_muon]}
        return {moment: own for moment, own in names.items() if own}

    def moments(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """All moments that lie here: (moment, parameter, first, what this rank has of it from the parameter's element ``first``
        on, flat). Zeros, made now, before the first step."""
        if not self._has_state():
            self._create_state()
        for moment, names in self.moment_names().items():
            for name in names:
                if self._zero_stage == 0:
                    yield moment, name, 0, self._state(name)[moment].view(-1)
                elif (fragment := self._twins[name]._hp_mapping) is not None:  # type: ignore[attr-defined]
                    flat = self._engine.optimizer.single_partition_of_fp32_groups[fragment.param_group_index]
                    here = fragment.hp_fragment_address
                    own = self._optimizer.state[flat][moment][here.start : here.start + here.numel]
                    yield moment, name, fragment.lp_fragment_address.start, own

    def begin_at(self, applied_steps: int) -> None:
        """Takes over what was written into parameters and moments, as after ``applied_steps`` steps (Adam counts them)."""
        self.applied_steps = applied_steps
        if self._zero_stage == 1:
            self._engine.optimizer.refresh_fp32_params()
        if not self._has_state():
            self._create_state()
        for part in self._parts:
            for group in part.param_groups:
                if "step" in group:  # apex counts per group
                    group["step"] = applied_steps
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(applied_steps)

    def state_tensors(self) -> Iterator[Tensor]:
        """The fp32 master part and the moments, wherever they lie; counters of steps are left out."""
        if self._zero_stage == 1:
            yield from self._engine.optimizer.single_partition_of_fp32_groups
        for part in self._parts:
            for state in part.state.values():
                yield from (t for t in state.values() if isinstance(t, Tensor) and t.dim())

    def buffers(self) -> Iterator[Tensor]:
        """What ZeRO keeps on the device beside parameters and state: with offloading, room for one gradient."""
        room = getattr(self._engine.optimizer, "temp_grad_buffer_for_gpu_offload", None)
        if room is not None:
            yield room

    def _build(
        self, kinds: Mapping[str, str], config: OptimizerConfig, kernels: Literal["torch", "apex"]
    ) -> torch.optim.Optimizer:
        decays = {n: kinds[n] not in config.no_decay for n in self._twins}
        groups = []
        for decaying, rate in ((True, config.weight_decay), (False, 0.0)):
            own = [t for n, t in self._twins.items() if n not in self._by_muon and decays[n] is decaying]
            groups += [{"params": own, "weight_decay": rate, "peak": config.lr}] if own else []
        adam = _adamw(groups, config, kernels)
        if not self._by_muon:
            return adam
        matrices = {"params": [self._twins[n] for n in self._twins if n in self._by_muon], "peak": config.muon_lr}
        muon = torch.optim.Muon([matrices], lr=config.muon_lr, weight_decay=config.muon_decay, momentum=config.muon_momentum)
        return _Both(adam, muon)

    def _state(self, name: str) -> dict[str, Tensor]:
        """A parameter's own optimizer state, without ZeRO."""
        optimizer = self._optimizer
        if isinstance(optimizer, _Both):
            optimizer = optimizer.parts[name in self._by_muon]
        return optimizer.state[self._twins[name]]

    @property
    def _parts(self) -> tuple[torch.optim.Optimizer, ...]:
        return self._optimizer.parts if isinstance(self._optimizer, _Both) else (self._optimizer,)

    def _has_state(self) -> bool:
        return any(part.state for part in self._parts)

    def _create_state(self) -> None:
        """Makes the state that the optimizer would make at its first step, so that it can be read or filled."""
        for part in self._parts:
            for group in part.param_groups:
                if type(part).__module__.startswith("apex"):
                    group["step"] = 0
                for flat in group["params"]:
                    if isinstance(part, torch.optim.Muon):
                        part.state[flat] = {"momentum_buffer": torch.zeros_like(flat)}
                        continue
                    step = torch.tensor(0.0, device=flat.device if group.get("fused") else "cpu")
                    part.state[flat] = {"step": step, "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}

    def _share_storage(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._twins[name].data

    def _add_up_parts(self) -> None:
        """Sums the gradients of parameters that are the same on all tensor-parallel ranks over these ranks."""
        parts = [
            self._parameters[name].grad
            for name, twin in self._twins.items()
            if not twin.tensor_model_parallel and self._parameters[name].grad is not None  # type: ignore[attr-defined]
        ]
        if parts:
            whole = sum_over_tensor_ranks(_flatten_dense_tensors(parts))
            for part, summed in zip(parts, _unflatten_dense_tensors(whole, parts), strict=True):
                part.copy_(summed)  # type: ignore[union-attr]

    def _clip_reduced(self, *_: Any) -> None:
        """ZeRO 0 leaves reduced gradients in the twins; the norm of the whole model's is taken, and bounded, just before
        the update."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        twins = [t for t in self._twins.values() if t.grad is not None]
        counted: list[Any] = [t.grad for t in twins if first or t.tensor_model_parallel]  # type: ignore[attr-defined]
        square = torch.stack([g.square().sum(dtype=torch.float64) for g in counted]).sum() if counted else torch.zeros(())
        square = sum_over_replica(square.to(twins[0].device, torch.float64))
        self._grad_norm = float(square.sqrt())
        bound = math.inf if self._clip is None else self._clip
        if self._grad_norm > bound:
            torch._foreach_mul_([t.grad for t in twins if t.grad is not None], bound / self._grad_norm)


class _Both(torch.optim.Optimizer):
    """Two optimizers that step together, their groups in one list."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer):
        self.parts = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.param_groups = [*first.param_groups, *second.param_groups]  # the same dicts: a rate set here holds there

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def _adamw(groups: Sequence[dict[str, Any]], config: OptimizerConfig, kernels: Literal["torch", "apex"]) -> torch.optim.Optimizer:
    """The fused AdamW of apex or torch; torch's has a CPU's vector instructions too."""
    if kernels == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, lr=config.lr, betas=config.betas, eps=config.eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def load_deepspeed() -> Any:
    """The library, set up so that it neither warns nor compiles; its import takes seconds."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asserts it even for a single process
    # On CPUs DeepSpeed would compile a shared-memory collective at start: over a minute, behind a lock file.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _initialize(twins: nn.Module, adam: torch.optim.Optimizer, zero_stage: int, clip: float | None, offload: bool) -> Any:
    zero: dict[str, Any] = {
        "stage": zero_stage,
        "overlap_comm": False,
        "contiguous_gradients": False,
        "reduce_bucket_size": BUCKET,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": (clip or 0.0) if zero_stage else 0.0,
        "zero_optimization": zero,
    }
    engine, *_ = load_deepspeed().initialize(
        model=twins, optimizer=adam, mpu=_Groups(), dist_init_required=False, config=settings
    )
    engine.pipeline_parallelism = True  # its word for "backward runs outside": then it makes the bucket that offloading copies to
    return engine


class _Groups:
    """Megatron's groups under the names that DeepSpeed asks for."""

    get_model_parallel_group = staticmethod(parallel_state.get_model_parallel_group)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_pipeline_model_parallel_world_size = staticmethod(parallel_state.get_pipeline_model_parallel_world_size)
    get_pipeline_model_parallel_rank = staticmethod(parallel_state.get_pipeline_model_parallel_rank)
    get_pipeline_model_parallel_group = staticmethod(parallel_state.get_pipeline_model_parallel_group)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(parallel_state.get_model_parallel_group())

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank(parallel_state.get_model_parallel_group())

    def get_sequence_parallel_world_size(self) -> int:
        return 1

    def get_sequence_parallel_rank(self) -> int:
        return 0
