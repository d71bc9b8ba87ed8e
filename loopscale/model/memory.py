"""Bytes that a rank will hold: predicted from the configuration alone, before anything is built.

What stays is exact: fp32 parameters and gradients, ZeRO's fp32 master part and moments with the padding that it adds, the
buffers. What a step adds is found by going through a ring plan operation by operation: what each leaves behind until its
backward, and what it needs while it runs. The plan is that of the deepest microbatches: no law draws more visits with
gradient, but a plan of mixed depths may keep a few more of them at once, ``in_flight`` times the gradient depth at most.

S positions, B sequences, N = S * B tokens of a microbatch, d width, f feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch

from loopscale.config import Batch, Config
from loopscale.config.tree import ModelConfig
from loopscale.model.ring import Ring, work_of
from loopscale.model.weights import Holder, has_value_embedding, holders, padded_rows
from loopscale.objective.supervision import GATED, exits, is_trained
from loopscale.parallel.buckets import BUCKET, UNDIVIDED_BUCKET
from loopscale.parallel.ring.links import POSTED
from loopscale.parallel.ring.plan import Kind, Plan

PLANNED = 4
"""Microbatches that are planned for each that the ring holds at once: more repeat what these have shown."""


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    """Master part and moments, where they lie on the device."""
    buffers: int
    """Registered buffers, the rotary table, Megatron's buffer for positions gathered over tensor-parallel ranks."""
    activations: int
    """The most that the ring adds, less ``logits``."""
    logits: int
    """Of that, one chunk of logits with its gradients, where the peak comes while an exit computes it; else 0."""
    update: int
    """The most that the update adds, when activations are gone: copies of gradients."""
    optimizer_cpu: int
    """Master part and moments in CPU memory, with ``parallel.offload_optimizer`` on a GPU."""

    @property
    def held(self) -> int:
        """What a step finds, and the gradients that it leaves."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        """The most that the device holds at once."""
        return self.held + max(self.activations + self.logits, self.update)

    def measurable(self) -> dict[str, int]:
        """By the kinds that can be told apart in a run: all that a step adds is ``activations``."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "optimizer_cpu": self.optimizer_cpu,
            "buffers": self.buffers,
            "activations": self.peak - self.held,
            "peak": self.peak,
        }


def predict_memory(config: Config, batch: Batch, ring: Ring, device: torch.device, compute: torch.dtype) -> list[Memory]:
    """Bytes of a rank of each stage, home first, for visits in the type ``compute`` on ``device``.

    The vocabulary of ``config`` is settled.
    """
    microbatches = min(batch.accumulation, PLANNED * ring.in_flight)
    plan = ring.plan([work_of(config, config.depth.deepest)] * microbatches)
    return [_predict(_Rank(config, batch, ring, stage, device, compute), plan) for stage in range(plan.stages)]


def _predict(rank: _Rank, plan: Plan) -> Memory:
    config, replicas = rank.config, rank.batch.data_parallel
    zero, on_cpu = config.parallel.zero, config.parallel.offload_optimizer and rank.device.type == "cuda"
    groups = rank.groups()
    multiple = 2 * replicas if zero else 1  # ZeRO pads each group
    padded = [ceil(sum(own) / multiple) * multiple for own in groups]
    gradients = 4 * sum(map(sum, groups))
    state = 4 * (3 * sum(padded) // replicas if zero else sum(rank.moments()))  # ZeRO's are a master and two moments
    ring, logits = _ring_peak(rank, plan, gradients)
    return Memory(
        parameters=4 * (rank.untrained() + sum(padded)),
        gradients=gradients,
        optimizer=0 if on_cpu else state,
        optimizer_cpu=state if on_cpu else 0,
        buffers=rank.buffers() + (4 * max(map(max, groups), default=0) if on_cpu else 0),  # one gradient on its way to the CPU
        activations=ring - logits,
        logits=logits,
        update=_update_peak(rank, groups, padded),
    )


# ---- parameters


def stage_holders(config: Config, slices: tuple[int, ...]) -> list[list[Holder]]:
    """What each stage holds."""
    stage_of_layer = [s for s, own in enumerate(slices) for _ in range(own)]
    held: list[list[Holder]] = [[] for _ in slices]
    for holder in holders(config.model, config.corpus.sequence_length):
        part, *where = holder.parameter.split(".")
        held[stage_of_layer[int(where[1])] if part == "core_block" else 0].append(holder)
    return held


def elements(holder: Holder, tensor: int) -> int:
    """Elements that each of ``tensor`` ranks holds of a parameter."""
    if holder.padded:
        rows, width = holder.weights[0].shape
        return padded_rows(rows, tensor) // tensor * width
    whole = sum(prod(weight.shape) for weight in holder.weights)
    return whole if holder.tensor_axis is None else whole // tensor


# ---- layers


@dataclass(frozen=True)
class LayerBytes:
    """One layer and one microbatch on one rank."""

    input: int
    """What it keeps where it is computed again."""
    kept: int
    """What it keeps for its backward, matrices cast to bf16 among it."""
    forward: int
    """The most that it needs at once when it keeps nothing."""
    backward: int
    """The most that its backward needs beside what was kept, and the gradient that it begins with."""


def layer_bytes(
    model: ModelConfig, rows: int, length: int, *, bf16: bool = False, varlen: bool = False, tensor: int = 1,
    divided: int = 1, with_values: bool = False,
) -> LayerBytes:  # fmt: skip
    """One layer on ``rows`` sequences of ``length`` tokens, on each of ``tensor`` ranks; ``divided``: ranks that share
    positions between layers. ``varlen``: attention by the flash kernel for documents of any length; else documents are
    taken to be shorter than sequences, so that rows are gathered to be attended to under a mask.

    Kept are norms' inputs, in fp32 whatever the precision, and what enters attention and feed-forward; what attention
    multiplies and its output; SwiGLU's two branches, one of them twice, their activation and product, or ReLU's result and
    its square.
    """
    d, f, c, tokens = model.hidden_size, model.ffn_size, model.head_width, rows * length
    q, kv, width = model.heads * c, model.key_value_heads * c, 2 if bf16 else 4
    swiglu, fused = model.activation == "swiglu", q + 2 * kv
    # Varlen: several rows are copied to become contiguous; the values of one keep the product that they are part of. Dense:
    # outputs are gathered again.
    attended = fused + q + (0 if rows > 1 else q + kv) if varlen else fused + 2 * q
    inner = (5 if swiglu else 2) * f
    inside = width * (attended + inner + (kv if with_values else 0)) + 4 * model.heads
    if model.qk_norm:
        inside += 4 * (q + kv) if bf16 else 4 * (fused + (q if q != kv else 0))
    between = (2 if model.layer_norm == "pre" else 4) * 4 * (d + 1) + 2 * width * d
    kept = tokens * between // divided + tokens * inside // tensor
    if bf16:
        matrices = d * (2 * q + 2 * kv + (3 if swiglu else 2) * f) // tensor
        kept += 2 * matrices + (0 if varlen else 2 * rows * length**2)  # matrices and mask are cast at every use
    state, product = tokens * width * d // divided, tokens * width * f // tensor
    return LayerBytes(
        input=state,
        kept=kept,
        forward=2 * state + tokens * width * max(inner + (0 if swiglu else f), fused + attended) // tensor,
        backward=state + max(product + (6 if bf16 else 4) * d * f // tensor, (2 if swiglu else 1) * product),
    )


# ---- one rank


class _Rank:
    """What a rank of stage ``stage`` holds and what its operations take, in bytes, for one microbatch.

    A state is [S, B, d] fp32, of the positions that lie here.
    """

    def __init__(self, config: Config, batch: Batch, ring: Ring, stage: int, device: torch.device, compute: torch.dtype):
        self.config, self.batch, self.device, self.stage = config, batch, device, stage
        model, parallel = config.model, config.parallel
        self.model, self.objective, self.length = model, config.objective, config.corpus.sequence_length
        self.is_home, self.alone, self.own_layers = stage == 0, len(ring.slices) == 1, ring.slices[stage]
        self.tensor = parallel.tensor
        self.divided = parallel.tensor if parallel.sequence_parallel else 1
        self.bf16 = compute == torch.bfloat16
        self.varlen = self.bf16 and device.type == "cuda"
        self.tokens = batch.microbatch * self.length
        self.state = 4 * self.tokens * model.hidden_size // self.divided
        self.held = stage_holders(config, ring.slices)[stage]
        self.trained = [h for h in self.held if is_trained(config.objective, h.parameter)]
        self.first_layer = model.prelude_layers + sum(ring.slices[:stage])
        self.recompute = config.train.recompute
        self.on_cpu = config.train.offload_activations and device.type == "cuda"  # on a CPU it frees nothing

    def groups(self) -> list[list[int]]:
        """Elements of each parameter, by the optimizer's groups: those that decay, and those that do not."""
        no_decay = self.config.optimizer.no_decay
        split = [[h for h in self.trained if (h.weights[0].kind in no_decay) is exempt] for exempt in (False, True)]
        return [[elements(h, self.tensor) for h in own] for own in split if own]

    def moments(self) -> list[int]:
        """Elements of each parameter's moments: two, or Muon's one."""
        muon = self.config.optimizer.name == "muon"
        return [(1 if muon and h.weights[0].kind == "matrix" else 2) * elements(h, self.tensor) for h in self.trained]

    def untrained(self) -> int:
        return sum(elements(h, self.tensor) for h in self.held) - sum(elements(h, self.tensor) for h in self.trained)

    def gradients(self, *parts: str) -> int:
        """Bytes of the gradients of the parameters that begin with one of ``parts``."""
        return sum(4 * elements(h, self.tensor) for h in self.trained if h.parameter.startswith(parts))

    def undivided(self) -> int:
        """Bytes of the gradients that sequence parallelism leaves to be added up over tensor-parallel ranks."""
        return sum(4 * elements(h, 1) for h in self.trained if h.tensor_axis is None) if self.divided > 1 else 0

    def buffers(self) -> int:
        model = self.model
        layers = self.own_layers + (model.prelude_layers + model.coda_layers if self.is_home else 0)
        gains = 2 * 4 * model.head_width * layers if model.qk_norm else 0
        turns = 4 * self.length * model.head_width if model.positions == "rope" else 0
        gathered = self.tokens * model.hidden_size * (2 if self.bf16 else 4) if self.divided > 1 and layers else 0
        return gains + turns + gathered

    # ---- layers

    def layer(self, index: int) -> LayerBytes:
        """Layer ``index`` over prelude, core and coda."""
        model = self.model
        total = model.prelude_layers + model.core_layers + model.coda_layers
        with_values = model.value_embeddings and has_value_embedding(index, total)
        return layer_bytes(
            model, self.batch.microbatch, self.length, bf16=self.bf16, varlen=self.varlen, tensor=self.tensor,
            divided=self.divided, with_values=with_values,
        )  # fmt: skip

    def block(self, first: int, count: int) -> LayerBytes:
        """``count`` layers from layer ``first`` on, under ``train.recompute: layer`` each computed again; zeros for none."""
        layers = [self.layer(first + i) for i in range(count)]
        if not layers:
            return LayerBytes(0, 0, 0, 0)
        forward = max(each.forward for each in layers)
        if self.recompute == "layer":
            again = max(each.kept + each.backward for each in layers)
            return LayerBytes(layers[0].input, sum(each.input for each in layers), forward, again)
        return LayerBytes(layers[0].input, sum(each.kept for each in layers), forward, layers[-1].backward)

    # ---- operations

    def feed(self) -> int:
        """What the visits share of the input."""
        tensors = (self.model.state_init == "embedding") + (self.model.inject not in ("none", "add"))
        return max(tensors, self.model.inject == "add") * self.state

    def prelude(self) -> LayerBytes:
        """The prelude with the half of the injection that is computed once; ``kept`` is beside the feed."""
        model, layers = self.model, self.block(0, self.model.prelude_layers)
        tail = {"none": 0, "add": 0, "huginn_linear": 1, "parcae": 3}.get(model.inject, 2)  # e, its norm, their product
        tail -= model.state_init == "embedding" and tail > 0  # then e is part of the feed
        dropped = self.state if model.embedding_dropout else 0
        return LayerBytes(0, layers.kept + tail * self.state + dropped, layers.forward + 2 * self.state, layers.backward)

    def visit(self) -> LayerBytes:
        """A visit with gradient. Kept are its input, what the injection makes of it, and its output where it is sent on."""
        model, layers = self.model, self.block(self.first_layer, self.own_layers)
        states = 1 + (not self.alone)
        if self.is_home:
            mixes = model.inject not in ("none", "add")
            states += mixes and model.between != "none"
            states -= not mixes and model.inject == "none" and model.between == "none" and self._first_input_is_kept
        else:
            states -= self._first_input_is_kept
        kept = layers.kept + states * self.state
        backward = layers.backward + 2 * self.state
        return LayerBytes(self.state, kept, layers.forward + 2 * self.state, backward)

    @property
    def _first_input_is_kept(self) -> bool:
        """Whether the state that a slice begins with is the very tensor that its first norm keeps."""
        return self.own_layers > 0 and not self.bf16

    def exit(self, visits: int, again: bool) -> tuple[int, int]:
        """The most that an exit over the states of ``visits`` visits takes, and what of it is one chunk of logits.

        ``again``: whether the head has a gradient already, to which another is added.
        """
        model, objective = self.model, self.objective
        decoded = visits if objective.kind in GATED else 1
        head = padded_rows(model.vocabulary, self.tensor) // self.tensor * model.hidden_size
        rows, width = decoded * self.tokens, 2 if self.bf16 else 4
        chunk = min(self.config.train.loss_chunk, rows) * head // model.hidden_size
        differentiated = objective.kind != "exit_gate_stage2"
        logits = (6 if self.bf16 else 4) * chunk + (4 * head if self.bf16 else 0)
        logits += 4 * head if differentiated and again else 0
        coda = self.block(model.prelude_layers + model.core_layers, model.coda_layers)
        coda_kept = decoded * (coda.kept if differentiated else 0) + (0 if differentiated else coda.forward)
        normed = (model.readout != "raw") + model.coda_norm + model.coda_linear + (model.between in ("shared", "unit"))
        states = decoded * (normed + (model.coda_layers > 0)) * self.state
        states += decoded * self.state if model.exit_gate == "normed" else 0
        scaled = 3 * visits * self.state if objective.norm_penalty or objective.anchor else 0
        entered = rows * model.hidden_size * (width * (2 if differentiated else 1))  # what the head multiplies; its gradient
        begin = coda_kept + states + scaled + entered + logits
        back = coda_kept + states + scaled + entered // 2 + decoded * self.state + coda.backward + 2 * self.state
        return (begin, logits) if begin >= back else (back, 0)


# ---- the peaks


def _ring_peak(rank: _Rank, plan: Plan, gradients: int) -> tuple[int, int]:
    """The most that a step holds beside what stays, and what of it is logits.

    Gradients count as staying, yet arise as the step goes: what is not there yet leaves room.
    """
    ledger = _Ledger(rank, plan)
    for operation in plan.operations[rank.stage]:
        ledger.perform(*operation)
    peak, logits = ledger.most
    return max(peak - gradients, 0), min(logits, max(peak - gradients, 0))


class _Ledger:
    """What the executor holds as a stage's operations run: see :mod:`loopscale.parallel.ring.execute`."""

    def __init__(self, rank: _Rank, plan: Plan):
        self.rank, self.plan = rank, plan
        depth = plan.work[0].depth
        b = rank.config.depth.gradient_visits(depth)
        self.first, self.exits = depth - plan.work[0].gradient_visits + 1, {e.visit: e for e in exits(rank.objective, depth, b)}
        self.prelude, self.visit, self.feed = rank.prelude(), rank.visit(), rank.feed() if rank.is_home else 0
        self.recomputed = rank.recompute == "visit"
        self.kept = self._kept()
        self.parts: dict[Kind, int] = {}  # gradients that an operation of this kind has made
        self.current: dict[int, int] = {}  # home's: the state that came home last, unless a visit keeps it
        self.waiting: dict[int, set[int]] = {}  # home's: visits by whose state a gradient is known
        self.fed: set[int] = set()
        received = plan.messages(rank.stage)
        channels = bool(received.states_received) + bool(received.gradients_received)
        self.mask = 0 if rank.varlen else 4 * rank.batch.microbatch * rank.length**2  # a microbatch's, from first to last
        self.held = channels * POSTED * rank.state + 16 * rank.tokens * rank.batch.accumulation  # tokens and targets
        self.most = (self.held, 0)

    def _kept(self) -> int:
        """What a visit leaves for its backward."""
        rank = self.rank
        if self.recomputed:
            return rank.state
        return (1 + (not rank.alone)) * rank.state if rank.on_cpu else self.visit.kept

    def perform(self, kind: Kind, m: int, r: int) -> None:
        match kind:
            case Kind.PRELUDE:
                self._prelude(m)
            case Kind.VISIT:
                self._visit(m, r)
            case Kind.EXIT:
                self._exit(m, r)
            case Kind.VISIT_BACKWARD:
                self._visit_backward(m, r)
            case Kind.PRELUDE_BACKWARD:
                self._prelude_backward(m)

    def _needs(self, transient: int, logits: int = 0) -> None:
        states = sum(self.current.values()) + sum(map(len, self.waiting.values()))
        total = self.held + sum(self.parts.values()) + states * self.rank.state + transient
        self.most = max(self.most, (total, logits))

    def _made(self, kind: Kind, *parts: str) -> None:
        self.parts[kind] = self.rank.gradients(*parts)

    def _prelude(self, m: int) -> None:
        keeps = not (self.recomputed or self.rank.on_cpu) and self.plan.work[m].gradient_visits > 0
        self._needs(self.feed + (self.prelude.kept if keeps else self.prelude.forward))
        self.held += self.feed + (self.prelude.kept if keeps else 0)

    def _visit(self, m: int, r: int) -> None:
        rank = self.rank
        self.held += self.mask if r == 1 else 0
        gradient = r >= self.first
        self._needs(self.visit.forward if self.recomputed or not gradient else max(self.visit.kept, self.visit.forward))
        self.held += self.kept if gradient else 0
        if rank.is_home:
            seen = any(r in e.visits and not gradient for e in self.exits.values())
            self.held += rank.state if seen else 0
            self.current[m] = 1 if rank.alone or not gradient else 0

    def _exit(self, m: int, r: int) -> None:
        rank, exit = self.rank, self.exits[r]
        if not rank.alone:
            self.current[m] = 1
        again = Kind.EXIT in self.parts
        self._made(Kind.EXIT, "coda", "readout", "gate", "embedding" if rank.model.tied_head else "head")
        transient, logits = rank.exit(len(exit.visits), again)
        scale = exit.scale_terms or rank.objective.kind in GATED
        self.waiting.setdefault(m, set()).update(exit.visits if scale else (r,))
        self._needs(transient, logits)
        self.held += 4 * rank.tokens  # losses
        last = r == self.plan.work[m].depth
        if last and not (rank.alone and self.kept > rank.state):  # else the last visit keeps it
            self.current[m] = 0
        if last and not rank.alone:
            self.waiting[m].discard(r)
        if not self.plan.work[m].gradient_visits:
            self.waiting[m].clear()
            self.held -= self.mask if last else 0

    def _visit_backward(self, m: int, r: int) -> None:
        rank = self.rank
        again = 0 if self.kept == self.visit.kept else self.visit.kept
        if m not in self.fed and rank.is_home:
            self.fed.add(m)
            self.held += self.feed  # its gradient
        self._needs(again + self.visit.backward + (0 if rank.alone else rank.state))
        self._made(Kind.VISIT_BACKWARD, "core_block", "injection", "between")
        self.held -= self.kept
        if r == self.first and not rank.is_home:
            self.held -= self.mask
        if rank.is_home:
            self.current[m] = 0
            self.waiting[m].discard(r)
            if r > self.first and rank.alone:
                self.waiting[m].add(r - 1)
            else:
                self.waiting[m].discard(r - 1)
        self._needs(0)

    def _prelude_backward(self, m: int) -> None:
        rank = self.rank
        keeps = not (self.recomputed or rank.on_cpu) and self.plan.work[m].gradient_visits > 0
        self._needs((0 if keeps else self.prelude.kept) + self.prelude.backward + rank.state)
        self._made(Kind.PRELUDE_BACKWARD, "prelude_block", "positions", *(() if rank.model.tied_head else ("embedding",)))
        self._needs(0)
        self.held -= (self.prelude.kept if keeps else 0) + self.feed * (1 + (m in self.fed)) + self.mask


def _update_peak(rank: _Rank, groups: list[list[int]], padded: list[int]) -> int:
    """The most that the update holds beside what stays: gradients are added up in copies of whole buckets, measured in
    fp64 one by one, and copied into one flat piece per group of the optimizer."""
    parallel, replicas = rank.config.parallel, rank.batch.data_parallel
    sizes = [size for own in groups for size in own]
    total, largest = 4 * sum(sizes), max(sizes, default=0)
    if not parallel.zero:
        return max(min(total, 4 * (UNDIVIDED_BUCKET + largest)), 4 * largest, rank.undivided())
    whole = parallel.offload_optimizer  # then the bucket is made as large as it may be
    bucket = max(4 * BUCKET if whole else min(total, 4 * BUCKET), rank.undivided())
    own = total // replicas  # gradients of other ranks' parts are gone by then
    return max(bucket, own + max(8 * largest, 4 * max(padded, default=0) // replicas) - total)
