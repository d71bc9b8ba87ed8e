"""Core attention of Megatron's layers: rotary positions, then scaled dot products within documents.

S positions, B sequences, n query heads, g key/value heads, c head width. Megatron hands over [S, B, heads, c].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from loopscale.config.tree import ModelConfig
from loopscale.model.inputs import Documents


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: pair i of a head turns by position · base^(−2i/c) (Su et al. 2021).

    ``turns`` complex64 [S, c/2]; ``interleaved`` pairs neighbours, else the two halves of a head.
    """

    turns: Tensor
    interleaved: bool

    @classmethod
    def build(cls, length: int, width: int, base: float, interleaved: bool, device: torch.device) -> Rotary:
        frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
        angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequencies)
        return cls(torch.polar(torch.ones_like(angles), angles).to(torch.complex64), interleaved)

    def __call__(self, x: Tensor) -> Tensor:
        """Turns ``x`` [S, B, heads, c]; fp32 inside."""
        turns = self.turns[: x.shape[0], None, None]
        if self.interleaved:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = turns.real, turns.imag
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Attending:
    """What every attention of a microbatch shares; travels through Megatron's layers as their attention mask."""

    documents: Documents
    rotary: Rotary | None
    tokens: Tensor
    """int64 [S, B], for layers that embed them into their values."""
    extra_values: Tensor | None = None
    """Added to the values of one layer, [S, B, g, c]."""


class CoreAttention(nn.Module):
    """softmax(q kᵀ / √c) v, causal and within documents; flash kernels where a GPU has them."""

    def __init__(self, config: Any, model: ModelConfig, tensor_size: int, **_: Any):
        super().__init__()
        self.head_width = model.head_width
        if model.qk_bias:
            self.q_bias = nn.Parameter(torch.empty(model.heads // tensor_size * model.head_width))
            self.k_bias = nn.Parameter(torch.empty(model.key_value_heads // tensor_size * model.head_width))
        self.biased = model.qk_bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attending: Attending, **_: Any) -> Tensor:
        """[S, B, heads, c] to [S, B, n * c]."""
        return self.attend(*self.placed(q, k, v, attending), attending)

    def placed(self, q: Tensor, k: Tensor, v: Tensor, attending: Attending) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with their biases, embeddings and positions."""
        if self.biased:
            q, k = q + self.q_bias.view(-1, self.head_width).to(q.dtype), k + self.k_bias.view(-1, self.head_width).to(k.dtype)
        if attending.extra_values is not None:
            v = v + attending.extra_values
        if attending.rotary is not None:
            q, k = attending.rotary(q), attending.rotary(k)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attending: Attending) -> Tensor:
        out = _varlen(q, k, v, attending) if q.device.type == "cuda" and q.dtype != torch.float32 else _dense(q, k, v, attending)
        return out.flatten(-2)


class EngineAttention(CoreAttention):
    """The same by Transformer Engine, which finds the documents by their boundaries as well."""

    def __init__(self, config: Any, model: ModelConfig, tensor_size: int, **given: Any):
        super().__init__(config, model, tensor_size)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.engine = TEDotProductAttention(config, **given)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attending: Attending) -> Tensor:
        if q.dtype == torch.float32:  # its kernels take bf16; visits run in fp32 where the loop is diagnosed
            return super().attend(q, k, v, attending)
        length, batch = q.shape[:2]
        ends = attending.documents.boundaries
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=length, max_seqlen_kv=length
        )
        rows = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        out: Tensor = self.engine(*rows, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed)
        return out.view(batch, length, -1).transpose(0, 1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, attending: Attending) -> Tensor:
    """The variable-length flash kernel: documents by their boundaries, no mask in memory."""
    from torch.nn.attention.varlen import varlen_attn

    length, batch = q.shape[:2]
    boundaries = attending.documents.boundaries
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(q, k, v, boundaries, boundaries, length, length, window_size=(-1, 0), enable_gqa=k.shape[1] != q.shape[1])
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length)).transpose(0, 1)


def _dense(q: Tensor, k: Tensor, v: Tensor, attending: Attending) -> Tensor:
    """The fallback for CPUs and fp32: causal rows at once, and the few that hold several documents under a mask."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    whole, mixed = attending.documents.rows
    if not len(mixed):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        causal = F.scaled_dot_product_attention(q[whole], k[whole], v[whole], is_causal=True, enable_gqa=grouped)
        masked = F.scaled_dot_product_attention(
            q[mixed], k[mixed], v[mixed], attn_mask=attending.documents.mask.to(q.dtype), enable_gqa=grouped
        )
        out = torch.cat((causal, masked))[torch.cat((whole, mixed)).argsort()]
    return out.permute(2, 0, 1, 3)
