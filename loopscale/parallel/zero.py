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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopscale.config.tree import OptimizerConfig
from loopscale.environment.doctor import apex_has_kernels

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, as the optimizers name them."""


class ZeroOptimizer:
    """Steps ``parameters`` (name -> parameter), all fp32 on one device.

    ``decayed`` names those under weight decay. DeepSpeed averages gradients over data-parallel ranks, so a loss that
    is divided by the global number of tokens must be multiplied by the number of those ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decayed: Iterable[str], config: OptimizerConfig, zero_stage: int):
        self._parameters, self._clip, self._zero_stage = dict(parameters), config.clip, zero_stage
        self._twins = {name: nn.Parameter(p.data) for name, p in self._parameters.items()}
        decayed = set(decayed)
        groups = [
            {"params": [t for n, t in self._twins.items() if (n in decayed) is decays], "weight_decay": rate}
            for decays, rate in ((True, config.weight_decay), (False, 0.0))
        ]
        self._adam = _adamw([g for g in groups if g["params"]], config)
        self._grad_norm = math.nan
        if zero_stage == 0:
            self._adam.register_step_pre_hook(self._clip_reduced)
        self._engine = _initialize(nn.ParameterList(self._twins.values()), self._adam, zero_stage, config.clip)
        self._share_storage()
        self.applied_steps = 0

    def step(self, lr: float) -> float:
        """Reduces, clips and applies the gradients collected in the parameters, and clears them; returns their norm."""
        for group in self._adam.param_groups:
            group["lr"] = lr
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

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """{moment: {parameter name: whole tensor}}, gathered over ranks; zeros before the first step. A collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.applied_steps == 0:
            return {moment: {n: torch.zeros_like(p.data) for n, p in self._parameters.items()} for moment in MOMENTS}
        if self._zero_stage == 0:
            return {moment: {n: self._adam.state[t][moment] for n, t in self._twins.items()} for moment in MOMENTS}
        self._link_moments()
        return {moment: {n: safe_get_full_optimizer_state(t, moment) for n, t in self._twins.items()} for moment in MOMENTS}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]], applied_steps: int) -> None:
        """Sets weights, moments and the number of steps that Adam's bias correction counts."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._create_state(applied_steps)
        if self._zero_stage == 1 and applied_steps:
            self._link_moments()
        self.applied_steps = applied_steps
        for name, twin in self._twins.items():
            twin.data.copy_(weights[name])
            if self._zero_stage == 1:
                safe_set_full_fp32_param(twin, weights[name].to(twin.device))
            for moment in MOMENTS if applied_steps else ():
                if self._zero_stage == 1:
                    safe_set_full_optimizer_state(twin, moments[moment][name].to(twin.device), moment)
                else:
                    self._adam.state[twin][moment].copy_(moments[moment][name])
        self._share_storage()

    def _create_state(self, applied_steps: int) -> None:
        """Makes the state that Adam would make at its first step, so that it can be filled."""
        if applied_steps == 0:
            return
        for group in self._adam.param_groups:
            if "step" in group or type(self._adam) is not torch.optim.AdamW:  # apex counts steps per group
                group["step"] = applied_steps
            for flat in group["params"]:
                step = torch.tensor(float(applied_steps), device=flat.device if group.get("fused") else "cpu")
                self._adam.state[flat] = {"step": step, **{m: torch.zeros_like(flat) for m in MOMENTS}}

    def _link_moments(self) -> None:
        """Tells each twin where its moments lie. DeepSpeed links after the first group's first step, when the other
        groups have no moments yet, and never again."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self._engine.optimizer
        for twins, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(twins, flat, self._adam.state)

    def _share_storage(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._twins[name].data

    def _clip_reduced(self, adam: torch.optim.Optimizer, *_: Any) -> None:
        """ZeRO 0 leaves whole, reduced gradients in the twins; their norm is taken, and bounded, just before the update."""
        twins = [t for t in self._twins.values() if t.grad is not None]
        bound = math.inf if self._clip is None else self._clip
        self._grad_norm = float(nn.utils.clip_grad_norm_(twins, bound))


def _adamw(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """apex's fused AdamW on a GPU where apex is built, else torch's fused one."""
    on_gpu = groups[0]["params"][0].device.type == "cuda"
    if on_gpu and apex_has_kernels():
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, lr=config.lr, betas=config.betas, eps=config.eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _initialize(twins: nn.Module, adam: torch.optim.Optimizer, zero_stage: int, clip: float | None) -> Any:
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asserts it even for a single process
    # On CPUs DeepSpeed would compile a shared-memory collective at start: over a minute, behind a lock file.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": (clip or 0.0) if zero_stage else 0.0,
        "zero_optimization": {"stage": zero_stage, "overlap_comm": False, "contiguous_gradients": False},
    }
    engine, *_ = deepspeed.initialize(
        model=twins, optimizer=adam, mpu=_Groups(parallel_state), dist_init_required=False, config=settings
    )
    return engine


class _Groups:
    """Megatron's groups under the names that DeepSpeed asks for."""

    def __init__(self, parallel_state: Any):
        self.get_model_parallel_world_size = parallel_state.get_tensor_model_parallel_world_size
        self.get_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
        self.get_model_parallel_group = parallel_state.get_model_parallel_group
        self.get_tensor_model_parallel_world_size = parallel_state.get_tensor_model_parallel_world_size
        self.get_tensor_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
        self.get_tensor_model_parallel_group = parallel_state.get_tensor_model_parallel_group
        self.get_pipeline_model_parallel_world_size = parallel_state.get_pipeline_model_parallel_world_size
        self.get_pipeline_model_parallel_rank = parallel_state.get_pipeline_model_parallel_rank
        self.get_pipeline_model_parallel_group = parallel_state.get_pipeline_model_parallel_group
        self.get_data_parallel_group = parallel_state.get_data_parallel_group
        self.get_data_parallel_rank = parallel_state.get_data_parallel_rank
        self.get_data_parallel_world_size = parallel_state.get_data_parallel_world_size

    def get_sequence_parallel_world_size(self) -> int:
        return 1

    def get_sequence_parallel_rank(self) -> int:
        return 0
