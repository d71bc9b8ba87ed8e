"""The looped model in plain PyTorch: the yardstick that tests hold the product's model against.

Written from design §2 and methods §2, and from nothing else: it imports torch only, so a mistake in the product cannot
hide in both. Everything is naive on purpose: a whole S x S mask, one loop over layers and one over visits, no cache, one
autograd graph. Parameters are a dict from global names to tensors and may be of any floating type; tests use float64.

    embedding.tokens [V, d]        embedding.positions [max_positions, d]  (learned positions only)
    {prelude|core|coda}.{i}.       attention_norm [d]  q [N*D, d]  k, v [G*D, d]  out [d, N*D]
                                   mlp_norm [d]  gate, up [F, d]  down [d, F]
    inject.                        A_log [d]  dt_bias [d]  weight [d, d]   (ortho only)
    readout.norm [d]               (rmsnorm readout only)
    head [V, d]                    (untied head only)

B rows, S positions, d width of the state, N query heads, G key/value heads, D width of one head, F inner width of the
feed-forward, V vocabulary, R visits, b of them with gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = Mapping[str, Tensor]
Documents = Sequence[Sequence[int]]
"""For each row, where its documents start: ascending, the first is 0."""

IGNORED = -100
"""Target of a position that no loss counts."""

ORTHO_EPS = 1e-6
"""Added to ||q||^2 in the ortho injection (methods §2.6)."""


@dataclass(frozen=True)
class Spec:
    """Shape and variants of one looped model."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    prelude: int
    core: int
    coda: int
    inject: Literal["none", "add", "ortho"] = "ortho"
    positions: Literal["rope", "learned"] = "rope"
    rope_base: float = 1e6
    rope_interleaved: bool = True
    readout: Literal["rmsnorm", "raw"] = "rmsnorm"
    tied_head: bool = False
    norm_eps: float = 1e-6
    norm_centered: bool = True


def forward(
    parameters: Parameters, spec: Spec, tokens: Tensor, documents: Documents, h0: Tensor | None, depth: int, gradient_visits: int
) -> list[tuple[int, Tensor, Tensor]]:
    """``(r, h_r [B, S, d], logits_r [B, S, V])`` for every visit r = 1 .. ``depth`` of ``tokens`` [B, S].

    ``h0`` [B, S, d] is the state before the first visit; None starts from the prelude's output e. Visits
    r <= depth - gradient_visits run without gradient, exits included. So the prelude learns through the injections of
    the last visits only, and through the initial state when that is e and every visit carries gradient.
    """
    if not 1 <= gradient_visits <= depth:
        raise ValueError(f"gradient_visits must be 1..{depth}, not {gradient_visits}")
    mask = attention_mask(documents, tokens.shape[1])
    e = embed(parameters, spec, tokens)
    e = stack(parameters, spec, "prelude", spec.prelude, e, mask)
    h = e if h0 is None else h0
    visits = []
    for r in range(1, depth + 1):
        with contextlib.nullcontext() if r > depth - gradient_visits else torch.no_grad():
            h = inject(parameters, spec, h, e)
            h = stack(parameters, spec, "core", spec.core, h, mask)
            logits = read_out(parameters, spec, stack(parameters, spec, "coda", spec.coda, h, mask))
        visits.append((r, h, logits))
    return visits


def loss(
    parameters: Parameters,
    spec: Spec,
    tokens: Tensor,
    documents: Documents,
    h0: Tensor | None,
    targets: Tensor,
    objective: Literal["terminal", "per_loop"],
    depth: int,
    gradient_visits: int,
) -> Tensor:
    """Mean cross entropy in nats over the positions of ``targets`` [B, S] that are not -100; a scalar.

    ``terminal`` counts the last visit, ``per_loop`` the mean over the visits that carry gradient.
    """
    valid = (targets != IGNORED).sum()
    supervised = gradient_visits if objective == "per_loop" else 1
    visits = forward(parameters, spec, tokens, documents, h0, depth, gradient_visits)[-supervised:]
    sums = [
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") for _, _, logits in visits
    ]
    return torch.stack(sums).mean() / valid


def embed(parameters: Parameters, spec: Spec, tokens: Tensor) -> Tensor:
    """Token vectors [B, S, d], plus those of the places in the sequence when positions are learned."""
    x = parameters["embedding.tokens"][tokens]
    return x + parameters["embedding.positions"][: tokens.shape[1]] if spec.positions == "learned" else x


def stack(parameters: Parameters, spec: Spec, part: str, layers: int, x: Tensor, mask: Tensor) -> Tensor:
    """The pre-norm layers ``part.0`` .. of prelude, core or coda, each attention and feed-forward with a residual."""
    for i in range(layers):
        weights = {name.removeprefix(f"{part}.{i}."): w for name, w in parameters.items() if name.startswith(f"{part}.{i}.")}
        x = x + attention(weights, spec, norm(spec, x, weights["attention_norm"]), mask)
        y = norm(spec, x, weights["mlp_norm"])
        x = x + (F.silu(y @ weights["gate"].T) * (y @ weights["up"].T)) @ weights["down"].T
    return x


def norm(spec: Spec, x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis; the learned gain is ``weight``, or 1 + ``weight`` when centered."""
    gain = 1 + weight if spec.norm_centered else weight
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps) * gain


def attention(weights: Parameters, spec: Spec, x: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of ``x`` [B, S, d] where ``mask`` [B, S, S] is true; query head j reads kv head j // (N/G)."""
    rows, length, _ = x.shape
    q = (x @ weights["q"].T).view(rows, length, spec.heads, spec.head_dim).transpose(1, 2)
    k = (x @ weights["k"].T).view(rows, length, spec.kv_heads, spec.head_dim).transpose(1, 2)
    v = (x @ weights["v"].T).view(rows, length, spec.kv_heads, spec.head_dim).transpose(1, 2)
    if spec.positions == "rope":
        q, k = rotate(spec, q), rotate(spec, k)
    kv_head = [j // (spec.heads // spec.kv_heads) for j in range(spec.heads)]
    scores = q @ k[:, kv_head].transpose(-1, -2) / spec.head_dim**0.5
    weight = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return (weight @ v[:, kv_head]).transpose(1, 2).reshape(rows, length, -1) @ weights["out"].T


def rotate(spec: Spec, x: Tensor) -> Tensor:
    """Rotary positions on ``x`` [B, heads, S, D]: pair i turns by position * base^(-2i/D), position counted in the sequence."""
    half = spec.head_dim // 2
    frequency = spec.rope_base ** (-2 * torch.arange(half, dtype=torch.float64) / spec.head_dim)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    if spec.rope_interleaved:
        x0, x1 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), dim=-1).flatten(-2)
    x0, x1 = x[..., :half], x[..., half:]
    return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), dim=-1)


def attention_mask(documents: Documents, length: int) -> Tensor:
    """[B, S, S], true where the query (second axis) may see the key (last axis): not later, and of the same document."""
    position = torch.arange(length)
    starts = [torch.tensor(list(row)) for row in documents]
    document = torch.stack([(position[:, None] >= row).sum(-1) for row in starts])
    return (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)


def inject(parameters: Parameters, spec: Spec, h: Tensor, e: Tensor) -> Tensor:
    """How the prelude's output ``e`` enters the state ``h``, both [B, S, d], before a visit."""
    if spec.inject == "none":
        return h
    if spec.inject == "add":
        return h + e
    step, q = ortho_terms(parameters, e)
    v = torch.exp(-step * parameters["inject.A_log"].exp()) * h
    overlap = (v * q).sum(-1, keepdim=True) / (q.square().sum(-1, keepdim=True) + ORTHO_EPS)
    return v - overlap * q + q


def ortho_terms(parameters: Parameters, e: Tensor) -> tuple[Tensor, Tensor]:
    """The step Δ [d] of the ortho injection and its input q = Δ * (W e) [B, S, d]."""
    step = F.softplus(parameters["inject.dt_bias"])
    return step, step * (e @ parameters["inject.weight"].T)


def read_out(parameters: Parameters, spec: Spec, x: Tensor) -> Tensor:
    """Logits [B, S, V] of the coda's output ``x`` [B, S, d]."""
    if spec.readout == "rmsnorm":
        x = norm(spec, x, parameters["readout.norm"])
    return x @ parameters["embedding.tokens" if spec.tied_head else "head"].T
