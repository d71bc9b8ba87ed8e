"""Megatron-core's transformer layers, configured for a looped block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from loopscale.config.tree import ModelConfig
from loopscale.model.attention import Attending, CoreAttention, EngineAttention
from loopscale.model.norm import HeadNorm, RMSNorm
from loopscale.model.sharing import Sharing
from loopscale.model.weights import VALUE_GATE_CHANNELS, has_value_embedding

KernelName: TypeAlias = Literal["torch", "te"]


def megatron_config(model: ModelConfig, sharing: Sharing) -> TransformerConfig:
    """Megatron's view of a model. Weights are ours to initialise; fusions that assume a GPU, or one use of a weight
    per step (the fused weight gradient), are off."""
    return TransformerConfig(
        num_layers=1,
        tensor_model_parallel_size=sharing.size,
        sequence_parallel=sharing.by_position,
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_width,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.activation == "swiglu",
        activation_func=F.silu if model.activation == "swiglu" else squared_relu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)²; Megatron's is compiled at its first call, which needs a C++ compiler on the machine."""
    return F.relu(x).square()


class ResidualNorm(nn.Module):
    """Stands where Megatron adds a branch to the residual: norm(x + branch), or x + norm(branch)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(None, model.hidden_size, model.norm_eps, model.norm_centered)
        self.on_branch = model.layer_norm == "branch"

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        def add(branch: tuple[Tensor, None], residual: Tensor, _: float) -> Tensor:
            return residual + self.norm(branch[0]) if self.on_branch else self.norm(residual + branch[0])

        return add


class ValueSelfAttention(SelfAttention):
    """Self-attention whose values gain 2 sigmoid(gate · x) times an embedding of the token, per key/value head."""

    def __init__(self, *arguments: Any, model: ModelConfig, sharing: Sharing, **options: Any):
        super().__init__(*arguments, **options)
        self.sharing, kv = sharing, model.key_value_heads // sharing.size
        self.value_gate = nn.Linear(min(VALUE_GATE_CHANNELS, model.hidden_size), kv, bias=False)
        self.value_embedding = nn.Embedding(model.vocabulary, kv * model.head_width)

    def forward(self, hidden_states: Tensor, attention_mask: Attending, **options: Any) -> tuple[Tensor, Tensor | None]:
        channels = self.sharing.enter(hidden_states[..., : self.value_gate.in_features])
        gate = 2 * torch.sigmoid(self.value_gate(channels))
        embedded = self.value_embedding(attention_mask.tokens).unflatten(-1, (gate.shape[-1], -1))
        with_values = replace(attention_mask, extra_values=gate.unsqueeze(-1) * embedded)
        return super().forward(hidden_states, with_values, **options)


def layer_spec(model: ModelConfig, sharing: Sharing, with_values: bool, kernels: KernelName) -> ModuleSpec:
    """One layer: x + Attention(norm x), then x + FFN(norm x), with the further norms of ``model.layer_norm``. Transformer
    Engine brings linear layers and attention; norms are ours, for they run in fp32."""
    column, row, core_attention = ColumnParallelLinear, RowParallelLinear, CoreAttention
    if kernels == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        column, row, core_attention = TEColumnParallelLinear, TERowParallelLinear, EngineAttention
    norm = ModuleSpec(RMSNorm, params={"centered": model.norm_centered})
    residual = get_bias_dropout_add if model.layer_norm == "pre" else ModuleSpec(ResidualNorm, params={"model": model})
    head_norm = HeadNorm if model.qk_norm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=partial(core_attention, model=model, tensor_size=sharing.size),
        linear_proj=row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(ValueSelfAttention, {"model": model, "sharing": sharing}, attention)
            if with_values
            else ModuleSpec(SelfAttention, submodules=attention),
            self_attn_bda=residual,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=residual,
        ),
    )


class Block(nn.Module):
    """Layers in sequence, possibly none: ``own`` of a part of the model whose first layer is number ``first`` over
    prelude, core and coda. They are named by their number in that part, whichever stage holds them."""

    def __init__(self, model: ModelConfig, sharing: Sharing, own: range, first: int, kernels: KernelName = "torch"):
        super().__init__()
        total = model.prelude_layers + model.core_layers + model.coda_layers
        config = megatron_config(model, sharing)
        self.layers = nn.ModuleDict()
        for i in own:
            with_values = model.value_embeddings and has_value_embedding(first + i, total)
            spec = layer_spec(model, sharing, with_values, kernels)
            self.layers[f"{i}"] = build_module(spec, config=config, layer_number=i + 1)

    def forward(self, h: Tensor, attending: Attending, compute: torch.dtype, recompute: bool) -> Tensor:
        """[S, B, d] fp32 to the same, inside in the type ``compute``. With ``recompute`` a layer keeps its input alone, and
        runs again in its backward."""
        h = h.to(compute)
        for layer in self.layers.values():
            run = partial(_run, layer, attending=attending)
            again = recompute and torch.is_grad_enabled()
            h = checkpoint(run, h, use_reentrant=False, preserve_rng_state=False) if again else run(h)
        return h.float()


def _run(layer: TransformerLayer, h: Tensor, attending: Attending) -> Tensor:
    """Matrices are cast to the type of ``h`` at every use, so that each use sends its gradient to the fp32 parameter in
    fp32; norm gains and biases stay fp32."""
    if h.dtype == torch.float32:
        return layer(h, attention_mask=attending)[0]
    cast = {n: p.to(h.dtype) if p.dim() > 1 else p for n, p in layer.named_parameters()}
    return functional_call(layer, cast, (h,), {"attention_mask": attending})[0]
