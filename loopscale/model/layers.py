"""Megatron-core's transformer layers, configured for a looped block."""

from __future__ import annotations

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

from loopscale.config.tree import ModelConfig
from loopscale.model.attention import Attending, CoreAttention
from loopscale.model.norm import RMSNorm


def megatron_config(model: ModelConfig) -> TransformerConfig:
    """Megatron's view of a model. Weights are ours to initialise; fusions that assume a GPU, or one use of a weight
    per step (the fused weight gradient), are off."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_width,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
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


def layer_spec(model: ModelConfig) -> ModuleSpec:
    """A pre-norm layer: x + Attention(norm x), then x + SwiGLU(norm x)."""
    norm = ModuleSpec(RMSNorm, params={"centered": model.norm_centered})
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                SelfAttention,
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear, core_attention=CoreAttention, linear_proj=RowParallelLinear
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


class Block(nn.Module):
    """Layers in sequence, possibly none."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, count: int):
        super().__init__()
        spec = layer_spec(model)
        self.layers = nn.ModuleList(build_module(spec, config=config, layer_number=i + 1) for i in range(count))

    def forward(self, h: Tensor, attending: Attending) -> Tensor:
        """[S, B, d] to the same."""
        for layer in self.layers:
            h, _ = layer(h, attention_mask=attending)
        return h
