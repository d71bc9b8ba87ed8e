"""The looped model in plain PyTorch: the yardstick that tests hold the product's model against.

Written from the papers' formulas, and from nothing else: it imports torch only, so a mistake in the product cannot
hide in both. Everything is naive on purpose: a whole S x S mask, one loop over layers, one over visits, one over rows, no
cache, one autograd graph. Parameters are a dict from global names to tensors and may be of any floating type; tests use
float64.

    embedding.tokens [V, d]        embedding.positions [max_positions, d]  (learned positions)
    {prelude|core|coda}.{i}.       attention_norm [d]  q [N*D, d]  k, v [G*D, d]  out [d, N*D]
                                   mlp_norm [d]  gate, up [F, d]  down [d, F]  (relu2: no gate)
                                   attention_post_norm, mlp_post_norm [d]  (sandwich, branch)
                                   q_bias [N*D]  k_bias [G*D]  (qk_bias)
                                   value_gate [G, min(32, d)]  value_embedding [V, G*D]  (value embeddings, some layers)
    inject.                        A_log [d]  dt_bias [d]  weight [d, d]  (diagonal, parcae, ortho)  norm [d]  (parcae)
                                   weight [d, 2d]  bias [d], if there is one  (huginn_linear)
    between.                       norm [d]  (rmsnorm)  damping [1]  (damping)
    coda_linear [d, d]             (coda_linear)
    readout.                       norm [d]  (rmsnorm, final_only, between: shared, exit_gate: normed)
                                   alpha [1]  log_scale [1]  (alpha)
    gate.                          weight [1, d]  bias [1]  (exit gate)
    head [V, d]                    (untied head)

B rows, S positions, d width of the state, N query heads, G key/value heads, D width of one head, F inner width of the
feed-forward, V vocabulary, R visits, b of them with gradient, T visits with gradient in which one row moves.
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
Visit = tuple[int, Tensor, Tensor]
Objective = Literal["terminal", "per_loop", "exit_gate", "exit_gate_stage2"]

IGNORED = -100
"""Target of a position that no loss counts."""

ORTHO_EPS = 1e-6
"""Added to ||q||^2 in the ortho injection."""

SCALE_FLOOR = 1e-6
"""Smallest root mean square that the alpha readout divides by."""

HEAD_EPS = 2.0**-23
"""In the norm of a query or key head: torch's default for fp32, which Parcae's code takes."""

GATE_CHANNELS = 32
"""Channels of the input that the gate of value embeddings reads, or all of them when there are fewer."""


@dataclass(frozen=True)
class Spec:
    """Shape and variants of one looped model; every variant's field and value is named as in ``model`` of the config."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    prelude: int
    core: int
    coda: int
    inject: Literal["none", "add", "huginn_linear", "diagonal", "parcae", "ortho"] = "ortho"
    positions: Literal["rope", "learned"] = "rope"
    rope_base: float = 1e6
    rope_interleaved: bool = True
    readout: Literal["rmsnorm", "raw", "final_only", "alpha"] = "rmsnorm"
    tied_head: bool = False
    norm_eps: float = 1e-6
    norm_centered: bool = True
    activation: Literal["swiglu", "relu2"] = "swiglu"
    layer_norm: Literal["pre", "sandwich", "branch"] = "pre"
    qk_norm: bool = False
    qk_bias: bool = False
    value_embeddings: bool = False
    embedding_multiplier: float = 1.0
    state_init: Literal["zero", "embedding", "normal", "truncated_normal"] = "embedding"
    between: Literal["none", "rmsnorm", "damping", "shared", "unit"] = "none"
    coda_linear: bool = False
    coda_norm: bool = False
    exit_gate: Literal["none", "raw", "normed"] = "none"


def forward(
    parameters: Parameters,
    spec: Spec,
    tokens: Tensor,
    documents: Documents,
    h0: Tensor | None,
    depth: int,
    gradient_visits: int,
    *,
    first_visit: Sequence[int] | Tensor | None = None,
    dropout: Tensor | None = None,
) -> list[Visit]:
    """``(r, h_r [B, S, d], logits_r [B, S, V])`` for every visit r = 1 .. ``depth`` of ``tokens`` [B, S].

    ``h0`` [B, S, d] is the state before the first visit; None asks for zeros (``state_init: zero``) or for the prelude's
    output e. Visits r <= depth - gradient_visits run without gradient, exits included. So the prelude learns through the
    injections of the last visits only, and through the initial state when that is e and every visit carries gradient.

    What stands ``between`` two visits is the end of the earlier one: where that carries no gradient, neither
    does it, so b visits learn b - 1 of these passages. The states given back are those before it.

    Row i keeps its initial state, untouched by ``between``, at visits r < ``first_visit[i]`` (1-based; None: all begin at
    1). ``dropout`` [B, S, d] multiplies the embeddings.
    """
    if not 1 <= gradient_visits <= depth:
        raise ValueError(f"gradient_visits must be 1..{depth}, not {gradient_visits}")
    first = first_visits(first_visit, tokens, depth)
    mask = attention_mask(documents, tokens.shape[1])
    e = embed(parameters, spec, tokens)
    e = e if dropout is None else e * dropout
    e = stack(parameters, spec, "prelude", spec.prelude, e, mask, tokens)
    h = initial_state(spec, h0, e)
    visits = []
    for r in range(1, depth + 1):
        with contextlib.nullcontext() if r > depth - gradient_visits else torch.no_grad():
            moves = (first <= r)[:, None, None]
            visited = inject(parameters, spec, h, e)
            visited = stack(parameters, spec, "core", spec.core, visited, mask, tokens)
            state = torch.where(moves, visited, h)
            logits = decode(parameters, spec, state, mask, tokens, final=r == depth)
            h = torch.where(moves, between(parameters, spec, state), state)
        visits.append((r, state, logits))
    return visits


def loss(
    parameters: Parameters,
    spec: Spec,
    tokens: Tensor,
    documents: Documents,
    h0: Tensor | None,
    targets: Tensor,
    objective: Objective,
    depth: int,
    gradient_visits: int,
    *,
    loop_weights: Sequence[float] | None = None,
    gate_entropy: float = 0.1,
    norm_penalty: float = 0.0,
    anchor: float = 0.0,
    anchor_target: float = 1.0,
    first_visit: Sequence[int] | Tensor | None = None,
    dropout: Tensor | None = None,
) -> Tensor:
    """The objective in nats, a mean over the positions of ``targets`` [B, S] that are not -100, plus penalties over rows.

    A row is supervised at the visits that carry gradient and in which it moves: T of them, the last of all.
    ``norm_penalty`` * mean square of those states, and ``anchor`` * (their root mean square - ``anchor_target``)^2, are
    means over rows; the states are those before ``between``.
    """
    visits = forward(
        parameters, spec, tokens, documents, h0, depth, gradient_visits, first_visit=first_visit, dropout=dropout
    )[-gradient_visits:]  # fmt: skip
    first, scored = first_visits(first_visit, tokens, depth), targets != IGNORED
    sums, penalties = [], []
    for i in range(tokens.shape[0]):
        states = torch.stack([h[i] for r, h, _ in visits if r >= first[i]])  # [T, S, d]
        logits = torch.stack([x[i] for r, _, x in visits if r >= first[i]])[:, scored[i]]  # [T, n, V]
        ce = torch.stack([F.cross_entropy(x, targets[i][scored[i]], reduction="none") for x in logits])  # [T, n]
        if objective == "terminal":
            value = ce[-1]
        elif objective == "per_loop":
            value = per_loop(ce, loop_weights)
        elif objective == "exit_gate":
            p = exit_probabilities(gate_logits(parameters, spec, states[:, scored[i]]))
            value = (p * ce).sum(0) - gate_entropy * -torch.xlogy(p, p).sum(0)
        else:
            value = gate_gain(ce, gate_logits(parameters, spec, states[:, scored[i]], frozen=True))
        sums.append(value.sum())
        if norm_penalty or anchor:
            square = states.square().mean()
            penalties.append(norm_penalty * square + anchor * (square.sqrt() - anchor_target).square())
    mean = torch.stack(sums).sum() / scored.sum()
    return mean + torch.stack(penalties).mean() if penalties else mean


def per_loop(ce: Tensor, loop_weights: Sequence[float] | None) -> Tensor:
    """[n]: the mean of ``ce`` [T, n] over visits, weighed by the last T of ``loop_weights`` divided by their sum."""
    weights = list(loop_weights)[-len(ce) :] if loop_weights is not None else [1.0] * len(ce)
    if len(weights) < len(ce):
        raise ValueError(f"{len(weights)} loop weights for {len(ce)} visits")
    return torch.stack([w / sum(weights) * x for w, x in zip(weights, ce, strict=True)]).sum(0)


def gate_logits(parameters: Parameters, spec: Spec, states: Tensor, frozen: bool = False) -> Tensor:
    """Logits of the exit probability lambda: the last axis of ``states``, or of their norm, to one number.

    ``frozen``: only the gate's own weights learn.
    """
    x = norm(spec, states, parameters["readout.norm"]) if spec.exit_gate == "normed" else states
    x = x.detach() if frozen else x
    return (x @ parameters["gate.weight"].T + parameters["gate.bias"]).squeeze(-1)


def exit_probabilities(gates: Tensor) -> Tensor:
    """p_t = lambda_t prod_{j<t} (1 - lambda_j) of the logits ``gates`` [T, ...]; the last visit takes what is left."""
    p, left = [], torch.ones_like(gates[0])
    for gate in gates[:-1]:
        p.append(left * gate.sigmoid())
        left = left * (1 - gate.sigmoid())
    return torch.stack([*p, left])


def gate_gain(ce: Tensor, gates: Tensor) -> Tensor:
    """Ouro's stage II per token, from ``ce`` and ``gates``, both [T, n]; [n].

    Ouro's stage II: gain I_t = max(0, CE_{t-1} - CE_t), detached; w = sigmoid(50 (I_t - 0.005)) is the target for "continue",
    by binary cross entropy against 1 - lambda_t, lambda_t of that same visit t; the sum over t = 2 .. T divided by T.
    """
    total = torch.zeros_like(ce[0])
    for t in range(1, len(ce)):
        gain = (ce[t - 1] - ce[t]).clamp(min=0).detach()
        w = torch.sigmoid(50 * (gain - 0.005))
        total = total - w * F.logsigmoid(-gates[t]) - (1 - w) * F.logsigmoid(gates[t])
    return total / len(ce)


def embed(parameters: Parameters, spec: Spec, tokens: Tensor) -> Tensor:
    """Token vectors [B, S, d], plus those of the places in the sequence when positions are learned."""
    x = parameters["embedding.tokens"][tokens] * spec.embedding_multiplier
    return x + parameters["embedding.positions"][: tokens.shape[1]] if spec.positions == "learned" else x


def initial_state(spec: Spec, h0: Tensor | None, e: Tensor) -> Tensor:
    """The state before the first visit: ``h0`` if given, else zeros or ``e``."""
    if h0 is not None:
        return h0
    if spec.state_init in ("normal", "truncated_normal"):
        raise ValueError(f"state_init {spec.state_init} needs h0")
    return torch.zeros_like(e) if spec.state_init == "zero" else e


def first_visits(first_visit: Sequence[int] | Tensor | None, tokens: Tensor, depth: int) -> Tensor:
    """[B]: the visit (1-based) at which each row begins to move."""
    first = torch.ones(len(tokens), dtype=torch.long) if first_visit is None else torch.as_tensor(first_visit)
    if first.shape != (len(tokens),) or not ((first >= 1) & (first <= depth)).all():
        raise ValueError(f"first_visit must be {len(tokens)} numbers in 1..{depth}, not {first.tolist()}")
    return first


def stack(
    parameters: Parameters, spec: Spec, part: str, layers: int, x: Tensor, mask: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """The layers ``part.0`` .. of prelude, core or coda, each an attention and a feed-forward with a residual."""
    for i in range(layers):
        weights = {name.removeprefix(f"{part}.{i}."): w for name, w in parameters.items() if name.startswith(f"{part}.{i}.")}
        valued = has_value_embedding(spec, part, i)
        for name in ("attention", "mlp"):
            y = norm(spec, x, weights[f"{name}_norm"])
            y = attention(weights, spec, y, mask, tokens if valued else None) if name == "attention" else mlp(weights, spec, y)
            if spec.layer_norm == "pre":
                x = x + y
            elif spec.layer_norm == "sandwich":
                x = norm(spec, x + y, weights[f"{name}_post_norm"])
            else:
                x = x + norm(spec, y, weights[f"{name}_post_norm"])
    return x


def has_value_embedding(spec: Spec, part: str, i: int) -> bool:
    """Every other layer, counted over prelude, core and coda, the last one included."""
    number = i + {"prelude": 0, "core": spec.prelude, "coda": spec.prelude + spec.core}[part]
    last = spec.prelude + spec.core + spec.coda - 1
    return spec.value_embeddings and number % 2 == last % 2


def rms(x: Tensor, eps: float = 0.0) -> Tensor:
    """sqrt(mean square over the last axis + eps), that axis kept."""
    return torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def norm(spec: Spec, x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis; the learned gain is ``weight``, or 1 + ``weight`` when centered."""
    gain = 1 + weight if spec.norm_centered else weight
    return x / rms(x, spec.norm_eps) * gain


def mlp(weights: Parameters, spec: Spec, x: Tensor) -> Tensor:
    """down(silu(gate x) * up x), or down(relu(up x)^2)."""
    up = x @ weights["up"].T
    inner = up.relu().square() if spec.activation == "relu2" else F.silu(x @ weights["gate"].T) * up
    return inner @ weights["down"].T


def attention(weights: Parameters, spec: Spec, x: Tensor, mask: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Grouped-query attention of ``x`` [B, S, d] where ``mask`` [B, S, S] is true; query head j reads kv head j // (N/G).

    ``tokens`` [B, S] are given to layers that add a gated embedding of them to the values.
    """
    rows, length, _ = x.shape
    q, k, v = (x @ weights[name].T for name in "qkv")
    if spec.qk_bias:
        q, k = q + weights["q_bias"], k + weights["k_bias"]
    q, k, v = (y.view(rows, length, -1, spec.head_dim).transpose(1, 2) for y in (q, k, v))  # [B, heads, S, D]
    if tokens is not None:
        gate = 2 * torch.sigmoid(x[..., :GATE_CHANNELS] @ weights["value_gate"].T)  # [B, S, G]
        value = weights["value_embedding"][tokens].view(rows, length, spec.kv_heads, spec.head_dim)
        v = v + (gate[..., None] * value).transpose(1, 2)
    if spec.positions == "rope":
        q, k = rotate(spec, q), rotate(spec, k)
    if spec.qk_norm:
        q, k = q / rms(q, HEAD_EPS), k / rms(k, HEAD_EPS)
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
    if spec.inject == "huginn_linear":
        return torch.cat((h, e), -1) @ parameters["inject.weight"].T + parameters.get("inject.bias", 0)
    if spec.inject == "parcae":
        e = norm(spec, e, parameters["inject.norm"])
    step, q = ortho_terms(parameters, e)
    v = torch.exp(-step * parameters["inject.A_log"].exp()) * h
    if spec.inject in ("diagonal", "parcae"):
        return v + q
    overlap = (v * q).sum(-1, keepdim=True) / (q.square().sum(-1, keepdim=True) + ORTHO_EPS)
    return v - overlap * q + q


def ortho_terms(parameters: Parameters, e: Tensor) -> tuple[Tensor, Tensor]:
    """The step Δ [d] of the diagonal injections and their input q = Δ * (W e) [B, S, d]."""
    step = F.softplus(parameters["inject.dt_bias"])
    return step, step * (e @ parameters["inject.weight"].T)


def between(parameters: Parameters, spec: Spec, h: Tensor) -> Tensor:
    """What the state ``h`` passes after a visit, before the next one's injection."""
    if spec.between == "none":
        return h
    if spec.between == "damping":
        return h * torch.sigmoid(parameters["between.damping"])
    if spec.between == "unit":
        return h / rms(h, spec.norm_eps)
    return norm(spec, h, parameters["readout.norm" if spec.between == "shared" else "between.norm"])


def decode(parameters: Parameters, spec: Spec, h: Tensor, mask: Tensor, tokens: Tensor, final: bool) -> Tensor:
    """Logits [B, S, V] of the state ``h`` after a visit, the last one when ``final``.

    The shared norm stands before the coda as well as in the readout; with nothing between the two, it is applied once.
    ``coda_norm`` puts it before the coda alone: the state that is fed on stays as it is. The norm without a gain (``between:
    unit``) is decoded as well as fed on.
    """
    h = between(parameters, spec, h) if spec.between == "unit" else h
    x = norm(spec, h, parameters["readout.norm"]) if spec.between == "shared" or spec.coda_norm else h
    if spec.coda_linear:
        x = x @ parameters["coda_linear"].T
    x = stack(parameters, spec, "coda", spec.coda, x, mask, tokens)
    normed_already = spec.between == "shared" and spec.coda == 0 and not spec.coda_linear
    return read_out(parameters, spec, x, final, normed_already)


def read_out(parameters: Parameters, spec: Spec, x: Tensor, final: bool = True, normed_already: bool = False) -> Tensor:
    """Logits [B, S, V] of the coda's output ``x`` [B, S, d]; ``normed_already``: without the norm of the readout."""
    if not normed_already and (spec.readout == "rmsnorm" or (spec.readout == "final_only" and final)):
        x = norm(spec, x, parameters["readout.norm"])
    elif spec.readout == "alpha":
        s, alpha = rms(x).clamp(min=SCALE_FLOOR), torch.sigmoid(parameters["readout.alpha"])
        x = torch.exp((1 - alpha) * parameters["readout.log_scale"] + alpha * s.log()) * (x / s)
    return x @ parameters["embedding.tokens" if spec.tied_head else "head"].T
