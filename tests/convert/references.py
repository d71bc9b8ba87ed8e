"""Huginn, Ouro, Parcae and xLLM-Loop in plain PyTorch: the yardstick that conversion is held against.

Written from the papers' formulas and the formats' own names. It imports torch only, and reads their tensors and their
`config.json` alone, so a mistake of a mapping cannot hide in both. Naive on purpose, and in whatever floating type the tensors
have; tests use float64.

B rows, S positions, d width, N query heads, G key/value heads, c width of a head, V vocabulary with its padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
About = Mapping[str, Any]
PARCAE_HEAD_EPS = 2.0**-23
"""torch's default epsilon of an RMSNorm in fp32."""
PARCAE_ROPE_BASE = 50_000.0


def huginn(w: Weights, about: About, tokens: Tensor, depth: int, h: Tensor) -> Tensor:
    """Logits [B, S, V] of ``tokens`` [B, S] after ``depth`` visits that begin with the state ``h`` [B, S, d]."""
    heads, eps, base = about["n_heads"], about["norm_eps"], about["rope_base"]

    def block(at: str, x: Tensor) -> Tensor:
        x = rms_norm(x + attend(at, rms_norm(x, w[f"{at}.norm_1.weight"], eps)), w[f"{at}.norm_2.weight"], eps)
        gate, up = (rms_norm(x, w[f"{at}.norm_3.weight"], eps) @ w[f"{at}.mlp.fc.weight"].T).chunk(2, dim=-1)
        return rms_norm(x + (F.silu(gate) * up) @ w[f"{at}.mlp.proj.weight"].T, w[f"{at}.norm_4.weight"], eps)

    def attend(at: str, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in (x @ w[f"{at}.attn.Wqkv.weight"].T).chunk(3, dim=-1))
        if about["qk_bias"]:
            q, k = q + w[f"{at}.attn.qk_bias"][0], k + w[f"{at}.attn.qk_bias"][1]
        return attention(turn_pairs(q, base), turn_pairs(k, base), v) @ w[f"{at}.attn.proj.weight"].T

    e = w["transformer.wte.weight"][tokens] * about["n_embd"] ** 0.5
    for i in range(about["n_layers_in_prelude"]):
        e = block(f"transformer.prelude.{i}", e)
    for _ in range(depth):
        h = torch.cat((h, e), -1) @ w["transformer.adapter.weight"].T
        h = h + w["transformer.adapter.bias"] if about["bias"] else h
        for i in range(about["n_layers_in_recurrent_block"]):
            h = block(f"transformer.core_block.{i}", h)
    x = rms_norm(h, w["transformer.ln_f.weight"], eps)
    for i in range(about["n_layers_in_coda"]):
        x = block(f"transformer.coda.{i}", x)
    head = w["transformer.wte.weight" if about["tie_embeddings"] else "lm_head.weight"]
    return rms_norm(x, w["transformer.ln_f.weight"], eps) @ head.T


def ouro(w: Weights, about: About, tokens: Tensor, depth: int) -> tuple[list[Tensor], Tensor]:
    """Logits [B, S, V] of every loop, and the probabilities [depth, B, S] that a token leaves after each."""
    eps, base, width = about["rms_norm_eps"], about["rope_theta"], about["head_dim"]

    def layer(at: str, x: Tensor) -> Tensor:
        y = attend(at, rms_norm(x, w[f"{at}.input_layernorm.weight"], eps))
        x = x + rms_norm(y, w[f"{at}.input_layernorm_2.weight"], eps)
        y = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        y = F.silu(y @ w[f"{at}.mlp.gate_proj.weight"].T) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
        return x + rms_norm(y @ w[f"{at}.mlp.down_proj.weight"].T, w[f"{at}.post_attention_layernorm_2.weight"], eps)

    def attend(at: str, x: Tensor) -> Tensor:
        q, k, v = ((x @ w[f"{at}.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, width)) for n in "qkv")
        return attention(turn_halves(q, base), turn_halves(k, base), v) @ w[f"{at}.self_attn.o_proj.weight"].T

    h = w["model.embed_tokens.weight"][tokens]
    head = w["model.embed_tokens.weight" if about["tie_word_embeddings"] else "lm_head.weight"]
    logits, leaving = [], []
    for _ in range(depth):
        for i in range(about["num_hidden_layers"]):
            h = layer(f"model.layers.{i}", h)
        h = rms_norm(h, w["model.norm.weight"], eps)
        logits.append(h @ head.T)
        gate = (h @ w["model.early_exit_gate.weight"].T + w["model.early_exit_gate.bias"]).squeeze(-1).sigmoid()
        leaving.append(gate)
    stays, probabilities = torch.ones_like(leaving[0]), []
    for gate in leaving[:-1]:
        probabilities.append(stays * gate)
        stays = stays * (1 - gate)
    return logits, torch.stack([*probabilities, stays])


def parcae(w: Weights, about: About, tokens: Tensor, depth: int, h: Tensor) -> Tensor:
    """As :func:`huginn`. Its ReLU² is halved."""
    heads, eps = about["num_attention_heads"], about["norm_eps"]
    before, core = about["n_layers_in_prelude"], about["n_layers_in_recurrent_block"]

    def block(at: str, x: Tensor, number: int) -> Tensor:
        x = x + attend(at, rms_norm(x, w[f"{at}.norm_1.weight"], eps), number)
        y = (rms_norm(x, w[f"{at}.norm_2.weight"], eps) @ w[f"{at}.mlp.fc.weight"].T).relu().square() / 2
        return x + y @ w[f"{at}.mlp.proj.weight"].T

    def attend(at: str, x: Tensor, number: int) -> Tensor:
        q, k, v = ((x @ w[f"{at}.attn.c_{n}.weight"].T).unflatten(-1, (heads, -1)) for n in "qkv")
        if f"{at}.attn.ve_gate.weight" in w:
            gate = 2 * (x[..., :32] @ w[f"{at}.attn.ve_gate.weight"].T).sigmoid()
            v = v + gate[..., None] * w[f"value_embeds.{number}.weight"][tokens].unflatten(-1, (heads, -1))
        q, k = (turn_pairs(y, PARCAE_ROPE_BASE) for y in (q, k))
        one = torch.ones(q.shape[-1]).to(q)
        q, k = rms_norm(q, one, PARCAE_HEAD_EPS), rms_norm(k, one, PARCAE_HEAD_EPS)
        return attention(q, k, v) @ w[f"{at}.attn.c_proj.weight"].T

    e = w["transformer.wte.weight"][tokens]
    for i in range(before):
        e = block(f"transformer.prelude.{i}", e, i)
    e = rms_norm(e, w["transformer.ln_prelude.weight"], eps)
    step = F.softplus(w["transformer.adapter.dt_bias"])
    decay = torch.exp(-step * torch.exp(w["transformer.adapter.A_log"]))
    for _ in range(depth):
        h = decay * h + step * (e @ w["transformer.adapter.B"].T)
        for i in range(core):
            h = block(f"transformer.core_block.{i}", h, before + i)
    x = h @ w["transformer.C.weight"].T
    for i in range(about["n_layers_in_coda"]):
        x = block(f"transformer.coda.{i}", x, before + core + i)
    head = w["transformer.wte.weight" if about["tie_embeddings"] else "lm_head.weight"]
    return rms_norm(x, w["transformer.ln_f.weight"], eps) @ head.T


def xllm(w: Weights, about: About, tokens: Tensor, depth: int, h: Tensor) -> Tensor:
    """As :func:`huginn`. Norm gains are stored less 1."""
    model = about["model"]
    eps, base, width = model["rmsnorm_eps"], model["rope_base"], model["head_dim"]

    def layer(number: int, x: Tensor) -> Tensor:
        at = f"layers.{number}.attention"
        y = rms_norm(x, 1 + w[f"{at}.norm.weight"], eps)
        q, k, v = ((y @ w[f"{at}.w{n}.weight"].T).unflatten(-1, (-1, width)) for n in "qkv")
        x = x + attention(turn_pairs(q, base), turn_pairs(k, base), v) @ w[f"{at}.wo.weight"].T
        at = f"layers.{number}.nffn"
        y = rms_norm(x, 1 + w[f"{at}.norm.weight"], eps)
        return x + (F.silu(y @ w[f"{at}.fc1.weight"].T) * (y @ w[f"{at}.fc3.weight"].T)) @ w[f"{at}.fc2.weight"].T

    def inject(h: Tensor, e: Tensor) -> Tensor:
        if model["huginn_input_injection"] == "linear":
            return torch.cat((h, e), -1) @ w["input_injection.adapter.weight"].T + w["input_injection.adapter.bias"]
        step = F.softplus(w["input_injection.dt_bias"])
        q = step * (e @ w["input_injection.input_adapter.weight"].T)
        v = torch.exp(-step * torch.exp(w["input_injection.A_log"])) * h
        if model["huginn_prelude_orthogonal"]:
            v = v - (v * q).sum(-1, keepdim=True) / (q.square().sum(-1, keepdim=True) + 1e-6) * q
        return v + q

    e = w["embed.weight"][tokens]
    for i in range(model["loop_start_layer"]):
        e = layer(i, e)
    if model["huginn_prelude_norm"] == "rms":
        e = rms_norm(e, 1 + w["huginn_prelude_norm_module.weight"], eps)
    for _ in range(depth):
        h = inject(h, e)
        for i in range(model["loop_start_layer"], model["loop_end_layers"]):
            h = layer(i, h)
        if model.get("huginn_recurrent_exit_norm") == "parameterless_rms":
            h = rms_norm(h, torch.ones(h.shape[-1]).to(h), eps)
    for i in range(model["loop_end_layers"], model["num_layers"]):
        h = layer(i, h)
    return rms_norm(h, 1 + w["output.final_norm.weight"], eps) @ w["output.output.weight"].T


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turn_pairs(x: Tensor, base: float) -> Tensor:
    """Rotary positions on ``x`` [B, S, heads, c]: channels 2i and 2i + 1 turn by position · base^(−2i/c)."""
    cos, sin = _turns(x, base)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def turn_halves(x: Tensor, base: float) -> Tensor:
    """As :func:`turn_pairs`, of channels i and i + c/2."""
    cos, sin = _turns(x, base)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _turns(x: Tensor, base: float) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().to(x), angle.sin().to(x)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, [B, S, N, c] of queries and [B, S, G, c] of keys and values to [B, S, N · c]; head j reads kv head j // (N/G)."""
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = torch.einsum("bqnc,bknc->bnqk", q, k) / q.shape[-1] ** 0.5
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    return torch.einsum("bnqk,bknc->bqnc", scores.masked_fill(~causal, float("-inf")).softmax(-1), v).flatten(2)
