"""A looped language model for `transformers`: some layers, a block of layers that is visited `depth` times, some more layers.

    e  = prelude(embed(tokens))
    h0 = zeros, e, or noise keyed by (seed, sample, position)
    h  = core(inject(between(h), e))                 `depth` times; h0 itself does not pass `between`
    logits = head(readout(coda(linear(h))))

This file needs torch and transformers alone. States are fp32 whatever the type of the weights; layers and head run in the type
of the weights.

B sequences, S positions of a call, T positions with those of before, d width, V vocabulary, n query heads, g key/value heads,
c head width.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

Kv = Literal["visit", "terminal"]
"""Where keys and values are kept: a bank for each visit of a layer; or one for each layer, of its last visit alone."""

ORTHO_EPSILON = 1e-6
SMALLEST_SCALE = 1e-6
VALUE_GATE_CHANNELS = 32


class LoopscaleConfig(PretrainedConfig):
    """What a model is. `depth` is the number of visits where a call does not say; `state_seed` keys the initial state's noise."""

    model_type = "loopscale"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 128,
        intermediate_size: int = 384,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 32,
        prelude_layers: int = 1,
        core_layers: int = 2,
        coda_layers: int = 1,
        depth: int = 5,
        max_position_embeddings: int = 128,
        activation: str = "swiglu",
        layer_norm: str = "pre",
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        qk_bias: bool = False,
        value_embeddings: bool = False,
        embedding_multiplier: float = 1.0,
        inject: str = "ortho",
        inject_bias: bool = False,
        state_init: str = "normal",
        state_std: float = 0.0,
        state_seed: int = 1,
        between: str = "none",
        coda_norm: bool = False,
        coda_linear: bool = False,
        readout: str = "rmsnorm",
        tied_head: bool = False,
        exit_gate: str = "none",
        positions: str = "rope",
        rope_base: float = 1e6,
        rope_interleaved: bool = True,
        rms_norm_eps: float = 1e-6,
        norm_centered: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.prelude_layers = prelude_layers
        self.core_layers = core_layers
        self.coda_layers = coda_layers
        self.num_hidden_layers = prelude_layers + core_layers + coda_layers
        self.depth = depth
        self.max_position_embeddings = max_position_embeddings
        self.activation = activation
        self.layer_norm = layer_norm
        self.qk_norm = qk_norm
        self.qk_norm_eps = qk_norm_eps
        self.qk_bias = qk_bias
        self.value_embeddings = value_embeddings
        self.embedding_multiplier = embedding_multiplier
        self.inject = inject
        self.inject_bias = inject_bias
        self.state_init = state_init
        self.state_std = state_std
        self.state_seed = state_seed
        self.between = between
        self.coda_norm = coda_norm
        self.coda_linear = coda_linear
        self.readout = readout
        self.tied_head = tied_head
        self.exit_gate = exit_gate
        self.positions = positions
        self.rope_base = rope_base
        self.rope_interleaved = rope_interleaved
        self.rms_norm_eps = rms_norm_eps
        self.norm_centered = norm_centered
        self.use_cache = use_cache
        for derived in ("num_hidden_layers", "tie_word_embeddings"):  # a tied head is the embedding itself, not a second tensor
            kwargs.pop(derived, None)
        super().__init__(tie_word_embeddings=False, **kwargs)


@dataclass
class LoopedOutput(CausalLMOutputWithPast):
    """``hidden_states``: the state after each visit, [B, S, d] fp32; ``visits``: how many there were."""

    visits: int | None = None


CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""What this version of transformers calls it."""


class LoopedCache(DynamicCache):
    """Keys and values of the tokens so far, [B, g, T, c] a bank: that of each layer of prelude and coda, and for the core, by
    ``kv``, of every visit of each layer or of each layer's last visit."""

    def __init__(self, kv: Kv, depth: int):
        super().__init__()
        self.kv, self.depth = kv, depth

    def joined(self, bank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the bank with those of a call behind them."""
        if bank >= len(self.layers):
            return k, v
        held: Any = self.layers[bank]
        return torch.cat((held.keys, k), 2), torch.cat((held.values, v), 2)

    def put(self, bank: int, k: Tensor, v: Tensor) -> None:
        """Sets a bank; the first time in the order of their numbers."""
        if bank >= len(self.layers):
            self.update(k, v, bank)
        else:
            self.layers[bank].keys, self.layers[bank].values = k, v


class Call:
    """What the layers share in a call: positions, mask, and where keys and values come from and go to."""

    def __init__(self, tokens: Tensor, turns: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: LoopedCache | None):
        self.tokens, self.turns, self.mask, self.cache = tokens, turns, mask, cache
        self.new: dict[int, tuple[Tensor, Tensor]] = {}
        """Banks with those of this call behind; the cache takes them when the call is over."""

    def joined(self, bank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            return k, v
        self.new[bank] = self.cache.joined(bank, k, v)
        return self.new[bank]

    def repeat(self, bank: int, into: int) -> None:
        """Gives bank ``into`` what the call added to another one."""
        k, v = (x[:, :, -self.tokens.shape[1] :] for x in self.new[bank])
        self.joined(into, k, v)

    def finish(self) -> None:
        assert self.cache is not None
        for bank in sorted(self.new):
            self.cache.put(bank, *self.new[bank])


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · gain over the last axis; fp32 inside, the type of ``x`` outside."""
    return F.rms_norm(x.float(), x.shape[-1:], gain, eps).to(x.dtype)


def wide(linear: nn.Linear, x: Tensor) -> Tensor:
    """A linear map in fp32."""
    return F.linear(x, linear.weight.float(), None if linear.bias is None else linear.bias.float())


class Norm(nn.Module):
    """RMSNorm with a learned gain w, or 1 + w."""

    def __init__(self, config: LoopscaleConfig):
        super().__init__()
        self.centered, self.eps = config.norm_centered, config.rms_norm_eps
        first = torch.zeros if self.centered else torch.ones
        self.weight = nn.Parameter(first(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.float()
        return rms_norm(x, 1 + gain if self.centered else gain, self.eps)


class Layer(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x), with the further norms of `layer_norm`."""

    def __init__(self, config: LoopscaleConfig, number: int):
        super().__init__()
        self.config = config
        d, f, c = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_attention_heads * c, config.num_key_value_heads * c
        self.attention_norm = Norm(config)
        self.q = nn.Linear(d, q, bias=config.qk_bias)
        self.k = nn.Linear(d, kv, bias=config.qk_bias)
        self.v = nn.Linear(d, kv, bias=False)
        self.out = nn.Linear(q, d, bias=False)
        self.with_values = config.value_embeddings and number % 2 == (config.num_hidden_layers - 1) % 2
        if self.with_values:
            self.value_gate = nn.Linear(min(VALUE_GATE_CHANNELS, d), config.num_key_value_heads, bias=False)
            self.value_embedding = nn.Embedding(config.vocab_size, kv)
        self.mlp_norm = Norm(config)
        if config.activation == "swiglu":
            self.gate = nn.Linear(d, f, bias=False)
        self.up = nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)
        if config.layer_norm != "pre":
            self.attention_post_norm = Norm(config)
            self.mlp_post_norm = Norm(config)

    def forward(self, h: Tensor, call: Call, bank: int) -> Tensor:
        h = self._added(h, self._attention(self.attention_norm(h), call, bank), "attention_post_norm")
        return self._added(h, self._feed_forward(self.mlp_norm(h)), "mlp_post_norm")

    def _added(self, h: Tensor, branch: Tensor, norm: str) -> Tensor:
        if self.config.layer_norm == "pre":
            return h + branch
        post: Tensor = getattr(self, norm)(branch if self.config.layer_norm == "branch" else h + branch)
        return h + post if self.config.layer_norm == "branch" else post

    def _feed_forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate(x)) * self.up(x) if self.config.activation == "swiglu" else F.relu(self.up(x)).square()
        out: Tensor = self.down(inner)
        return out

    def _attention(self, x: Tensor, call: Call, bank: int) -> Tensor:
        config = self.config
        q, k, v = (linear(x).unflatten(-1, (-1, config.head_dim)) for linear in (self.q, self.k, self.v))  # [B, S, heads, c]
        if config.qk_norm:
            q, k = rms_norm(q, None, config.qk_norm_eps), rms_norm(k, None, config.qk_norm_eps)
        if self.with_values:
            gate = 2 * torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))
            v = v + gate.unsqueeze(-1) * self.value_embedding(call.tokens).unflatten(-1, (-1, config.head_dim))
        if call.turns is not None:
            q, k = (turned(y, call.turns, config.rope_interleaved) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = call.joined(bank, k, v)
        causal = call.mask is None and q.shape[2] > 1
        grouped = config.num_key_value_heads != config.num_attention_heads
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask, is_causal=causal, enable_gqa=grouped)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return out


def rotary(config: LoopscaleConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · base^(−2i/c), each [B, S, 1, c/2] fp32."""
    c = config.head_dim
    frequencies = config.rope_base ** (-torch.arange(0, c, 2, dtype=torch.float64, device=positions.device) / c)
    angles = (positions.double()[..., None] * frequencies)[:, :, None]
    return angles.cos().float(), angles.sin().float()


def turned(x: Tensor, turns: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotary positions on ``x`` [B, S, heads, c]: neighbouring channels turn together, or one of each half; fp32 inside."""
    cos, sin = turns
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.float().chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    return (torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)).to(x.dtype)


class Injection(nn.Module):
    """How e enters the state h at every visit; ``source`` is what a visit needs of e."""

    def __init__(self, config: LoopscaleConfig):
        super().__init__()
        d, self.kind = config.hidden_size, config.inject
        if self.kind == "huginn_linear":
            self.weight = nn.Parameter(torch.zeros(d, 2 * d))  # the state's columns first
            self.bias = nn.Parameter(torch.zeros(d)) if config.inject_bias else None
        elif self.kind != "add":
            self.A_log = nn.Parameter(torch.zeros(d))
            self.dt_bias = nn.Parameter(torch.zeros(d))
            self.weight = nn.Parameter(torch.eye(d))
            self.norm = Norm(config) if self.kind == "parcae" else None

    def source(self, e: Tensor) -> Tensor:
        if self.kind == "add":
            return e
        weight = self.weight.float()
        if self.kind == "huginn_linear":
            return F.linear(e, weight[:, e.shape[-1] :], None if self.bias is None else self.bias.float())
        return F.softplus(self.dt_bias.float()) * F.linear(e if self.norm is None else self.norm(e), weight)

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        if self.kind == "add":
            return h + source
        if self.kind == "huginn_linear":
            return F.linear(h, self.weight[:, : h.shape[-1]].float()) + source
        v = torch.exp(-F.softplus(self.dt_bias.float()) * self.A_log.float().exp()) * h
        if self.kind == "ortho":
            along = (v * source).sum(-1, keepdim=True) / (source.square().sum(-1, keepdim=True) + ORTHO_EPSILON)
            v = v - along * source
        return v + source


class Between(nn.Module):
    """What the state passes from one visit to the next."""

    def __init__(self, config: LoopscaleConfig):
        super().__init__()
        self.norm = Norm(config) if config.between == "rmsnorm" else None
        self.unit_eps = config.rms_norm_eps if config.between == "unit" else None
        self.damping = nn.Parameter(torch.full((1,), 2.0)) if config.between == "damping" else None

    def forward(self, h: Tensor) -> Tensor:
        if self.norm is not None:
            normed: Tensor = self.norm(h)
            return normed
        if self.unit_eps is not None:
            return rms_norm(h, None, self.unit_eps)
        return h if self.damping is None else torch.sigmoid(self.damping.float()) * h


class Readout(nn.Module):
    """From the coda's output to what the head multiplies; ``final``: `depth` visits lie behind."""

    def __init__(self, config: LoopscaleConfig):
        super().__init__()
        self.kind = config.readout
        if self.kind in ("rmsnorm", "final_only"):
            self.norm = Norm(config)
        elif self.kind == "alpha":
            self.alpha = nn.Parameter(torch.zeros(1))
            self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, h: Tensor, final: bool) -> Tensor:
        if self.kind == "alpha":
            scale = h.square().mean(-1, keepdim=True).sqrt().clamp(min=SMALLEST_SCALE)
            alpha = torch.sigmoid(self.alpha.float())
            return ((1 - alpha) * self.log_scale.float() + alpha * scale.log()).exp() * (h / scale)
        normed = self.kind == "rmsnorm" or (self.kind == "final_only" and final)
        return self.norm(h) if normed else h


class LoopscaleForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]  # as every model of transformers is
    """The model. `forward` says what a call and `generate` take beyond the usual."""

    config_class = LoopscaleConfig
    config: LoopscaleConfig
    base_model_prefix = ""
    _no_split_modules = ["Layer"]  # noqa: RUF012  # as transformers declares it
    _supports_sdpa = True

    def __init__(self, config: LoopscaleConfig):
        super().__init__(config)
        d, p, c = config.hidden_size, config.prelude_layers, config.core_layers
        self.embedding = nn.ModuleDict({"tokens": nn.Embedding(config.vocab_size, d)})
        if config.positions == "learned":
            self.embedding["positions"] = nn.Embedding(config.max_position_embeddings, d)
        self.prelude = nn.ModuleList(Layer(config, i) for i in range(p))
        self.core = nn.ModuleList(Layer(config, p + i) for i in range(c))
        self.coda = nn.ModuleList(Layer(config, p + c + i) for i in range(config.coda_layers))
        self.inject = Injection(config) if config.inject != "none" else None
        self.between = Between(config)
        self.coda_linear = nn.Linear(d, d, bias=False) if config.coda_linear else None
        self.readout = Readout(config)
        self.gate = nn.Linear(d, 1) if config.exit_gate != "none" else None
        self.head = None if config.tied_head else nn.Linear(d, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding["tokens"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding["tokens"] = value

    def get_output_embeddings(self) -> nn.Linear | None:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        cache: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        depth: int | None = None,
        kv: Kv | None = None,
        exit_probability: float | None = None,
        exit_kl: float | None = None,
        samples: Tensor | None = None,
    ) -> LoopedOutput | tuple[Any, ...]:
        """Logits [B, S, V] fp32 of ``input_ids`` [B, S], or of the last ``logits_to_keep`` positions.

        ``attention_mask`` [B, T] is 0 where there is padding, on the left. ``depth``: visits, at least 1. ``kv``: "visit" keeps
        keys and values of every visit of a layer, as a forward without a cache has them; "terminal" those of the last visit
        alone, which all visits of later calls read. A cache of the former goes on at its own depth only. The cache is
        ``past_key_values`` or ``cache``, as the version of transformers calls it.

        The loop ends before ``depth`` when all rows would leave at all positions whose logits are asked for: where the gate's
        probabilities of leaving, visit by visit, add up to ``exit_probability``; or where the next-token distribution is within
        ``exit_kl`` nats of that a visit before (KL). Visits that did not run have the keys and values of the last one that did.

        ``samples`` int64 [B] key the noise of the initial state, if it has any: 0, 1, … by default, so that what a row gives
        depends on its place in the batch. ``labels`` [B, S] are the tokens themselves, -100 where they do not count.

        Raises ValueError for a depth below 1, embeddings in place of tokens, an exit by a gate that the model does not have, a
        cache or mask of another form, or terminal keys and values without a cache.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("the model reads input_ids; it cannot take inputs_embeds")
        depth, past = self.config.depth if depth is None else depth, past_key_values if cache is None else cache
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        if exit_probability is not None and self.gate is None:
            raise ValueError("the model has no exit gate; use exit_kl in place of exit_probability")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        memory = self._memory(past, kv, depth) if use_cache or past is not None else None
        if kv == "terminal" and memory is None:
            raise ValueError("kv='terminal' says what later calls read of a cache; it needs use_cache=True")
        begun, length = 0 if memory is None else memory.get_seq_length(), input_ids.shape[1]
        attended = self._attended(attention_mask, begun + length)
        if position_ids is not None:
            positions = position_ids.expand(input_ids.shape)
        elif attended is not None:
            positions = (attended.long().cumsum(-1) - 1).clamp(min=0)[:, begun:]
        else:
            positions = torch.arange(begun, begun + length, device=input_ids.device).expand(input_ids.shape)
        turns = rotary(self.config, positions) if self.config.positions == "rope" else None
        call = Call(input_ids, turns, self._mask(attended, begun, length, input_ids.device), memory)
        kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        real = None if attended is None else attended[:, begun:][:, kept]

        e = self._embedded(input_ids, positions)
        for i, layer in enumerate(self.prelude):
            e = layer(e, call, i)
        e = e.float()
        source = None if self.inject is None else self.inject.source(e)
        h, states, before = self._initial(e, positions, samples), list[Tensor](), None
        stays = torch.zeros((), device=h.device)
        for visit in range(1, depth + 1):
            h = self._visit(h, source, call, visit, self._first_bank(memory, visit))
            states += [h] if output_hidden_states else []
            leaves = visit == depth
            if exit_probability is not None and not leaves:
                stays = stays + F.logsigmoid(-self._gate(h[:, kept]))
                leaves = everywhere(1 - stays.exp() >= exit_probability, real)
            if leaves or exit_kl is not None:
                logits = self._decode(h, call, visit, kept)
            if exit_kl is not None and not leaves:
                leaves = before is not None and everywhere(divergence(logits, before) < exit_kl, real)
                before = logits
            if leaves:
                break
        if memory is not None:
            self._remember(call, visit, depth)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        found: dict[str, Any] = {"loss": loss, "logits": logits, "hidden_states": tuple(states) or None, "visits": visit}
        found[CACHE] = memory if use_cache else None
        out = LoopedOutput(**found)
        return out.to_tuple() if return_dict is False else out

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_position", None)  # of transformers 4; the cache knows its length
        return inputs

    # ---- the forward's parts

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        h = self.embedding["tokens"](tokens).float() * self.config.embedding_multiplier
        if self.config.positions == "learned":
            h = h + self.embedding["positions"](positions).float()
        return h.to(self.dtype) if self.prelude else h

    def _initial(self, e: Tensor, positions: Tensor, samples: Tensor | None) -> Tensor:
        kind = self.config.state_init
        if kind in ("embedding", "zero"):
            return e if kind == "embedding" else torch.zeros_like(e)
        rows = torch.arange(len(e), device=e.device) if samples is None else samples
        draw = truncated_normals if kind == "truncated_normal" else normals
        return self.config.state_std * draw(self.config.state_seed, positions, rows[:, None], e.shape[-1])

    def _visit(self, h: Tensor, source: Tensor | None, call: Call, visit: int, first_bank: int) -> Tensor:
        if visit > 1:
            h = self.readout(h, True) if self.config.between == "shared" else self.between(h)
        if self.inject is not None:
            h = self.inject(h, source)
        h = h.to(self.dtype)
        for i, layer in enumerate(self.core):
            h = layer(h, call, first_bank + i)
        return h.float()

    def _decode(self, h: Tensor, call: Call, visit: int, kept: slice) -> Tensor:
        """Logits of the state after a visit, fp32."""
        shared, once = self.config.between == "shared", not self.coda and self.coda_linear is None
        h = self.readout(h, True) if shared or self.config.coda_norm else h
        h = self.between(h) if self.config.between == "unit" else h
        h = h if self.coda_linear is None else wide(self.coda_linear, h)
        h = h.to(self.dtype) if self.coda else h
        for i, layer in enumerate(self.coda):
            h = layer(h, call, len(self.prelude) + i)
        h = h.float()[:, kept]
        h = h if shared and once else self.readout(h, visit >= self.config.depth)
        weight: Any = self.embedding["tokens"].weight if self.head is None else self.head.weight
        return F.linear(h.to(weight.dtype), weight).float()

    def _gate(self, h: Tensor) -> Tensor:
        """Log odds of leaving after this visit, [B, S]."""
        assert self.gate is not None
        return wide(self.gate, self.readout.norm(h) if self.config.exit_gate == "normed" else h).squeeze(-1)

    # ---- padding, keys and values

    @staticmethod
    def _attended(attention_mask: Tensor | None, total: int) -> Tensor | None:
        """Where there is no padding, bool [B, T]; None without any."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[1] != total:
            raise ValueError(f"attention_mask must be [batch, {total}], not {list(attention_mask.shape)}")
        return None if bool(attention_mask.all()) else attention_mask.bool()

    @staticmethod
    def _mask(attended: Tensor | None, begun: int, length: int, device: torch.device) -> Tensor | None:
        """What each position sees, bool [B or 1, 1, S, T]; None where it is all of before. Padding sees itself alone."""
        if attended is None and (begun == 0 or length == 1):
            return None
        here, there = torch.arange(begun, begun + length, device=device)[:, None], torch.arange(begun + length, device=device)
        seen = (there <= here)[None, None]
        return seen if attended is None else seen & attended[:, None, None] | (there == here)

    @staticmethod
    def _memory(given: DynamicCache | None, kv: Kv | None, depth: int) -> LoopedCache:
        if not isinstance(given, LoopedCache):  # `generate` begins with an empty one of its own
            if given is not None and (not isinstance(given, DynamicCache) or given.get_seq_length()):
                raise ValueError("the cache is not one that this model gave back; leave out cache_implementation")
            return LoopedCache(kv or "visit", depth)
        if kv not in (None, given.kv) or (given.kv == "visit" and given.depth != depth):
            raise ValueError(f"the cache is of kv={given.kv!r} and depth={given.depth}; go on with those, or without it")
        return given

    def _first_bank(self, memory: LoopedCache | None, visit: int) -> int:
        """The core's first bank at a visit; prelude and coda come before."""
        own = 0 if memory is None or memory.kv == "terminal" else (visit - 1) * len(self.core)
        return len(self.prelude) + len(self.coda) + own

    def _remember(self, call: Call, ran: int, depth: int) -> None:
        assert call.cache is not None
        if call.cache.kv == "visit":
            last = self._first_bank(call.cache, ran)
            for visit in range(ran + 1, depth + 1):
                for i in range(len(self.core)):
                    call.repeat(last + i, into=self._first_bank(call.cache, visit) + i)
        call.finish()


def everywhere(leaves: Tensor, real: Tensor | None) -> bool:
    """Whether it holds at all positions, padding aside; both bool [B, S]."""
    return bool((leaves if real is None else leaves | ~real).all())


def divergence(logits: Tensor, before: Tensor) -> Tensor:
    """KL(now ‖ before) in nats, [B, S]."""
    now, then = logits.log_softmax(-1), before.log_softmax(-1)
    return (now.exp() * (now - then)).sum(-1)


# ---- The initial state's noise: Philox4x32-10 (Salmon et al. 2011), a function of seed, sample, position and channel.


def uniforms(seed: int, positions: Tensor, samples: Tensor, width: int) -> Tensor:
    """Uniform in (0, 1], [*broadcast(positions, samples), width] fp32; the counter's last word, the step, is 0 in evaluation."""
    digest = hashlib.sha256(f"{seed}\0evaluation".encode()).digest()
    k0, k1 = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    blocks = torch.arange((width + 3) // 4, dtype=torch.int64, device=positions.device)
    positions, samples = torch.broadcast_tensors(positions, samples)
    shape, low = (*positions.shape, len(blocks)), 0xFFFFFFFF
    c0, c1, c2 = blocks.expand(shape), positions[..., None].expand(shape), samples[..., None].expand(shape)
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) & low ^ c1 ^ k0, p1 & low, (p0 >> 32) & low ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([(c.float() + 0.5) * 2.0**-32 for c in (c0, c1, c2, c3)], dim=-1).flatten(-2)[..., :width]


def normals(seed: int, positions: Tensor, samples: Tensor, width: int) -> Tensor:
    """Standard normal (Box-Muller on neighbouring channels), as :func:`uniforms`."""
    pairs = uniforms(seed, positions, samples, width + width % 2).unflatten(-1, (-1, 2))
    radius, angle = torch.sqrt(-2.0 * torch.log(pairs[..., 0])), 2.0 * torch.pi * pairs[..., 1]
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(-2)[..., :width]


def truncated_normals(seed: int, positions: Tensor, samples: Tensor, width: int) -> Tensor:
    """Normal within 3 standard deviations, as :func:`uniforms`."""
    inside = math.erf(3.0 / math.sqrt(2.0))
    return math.sqrt(2.0) * torch.erfinv((2.0 * uniforms(seed, positions, samples, width) - 1.0) * inside)
