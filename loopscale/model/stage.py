"""The looped model as the ring's executor runs it: prelude, visits of the shared core, exits.

    e  = prelude(embed(tokens))
    h0 = zeros, e, or noise keyed by (seed, step, sample, position)
    h  = core(inject(between(h), e))                 R times; h0 itself does not pass `between`
    logits = head(readout(coda(linear(h))))          at an exit

S positions, B sequences, d width, V vocabulary, N = S * B tokens. States travel as fp32 [S, B, d]; inside a visit the
weights are cast to the compute type, so the gradient of every visit reaches the fp32 parameter in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn
from torch.func import functional_call

from loopscale.config.tree import ModelConfig, ObjectiveConfig
from loopscale.model.attention import Attending, Rotary
from loopscale.model.between import BETWEEN
from loopscale.model.injection import make_injection
from loopscale.model.inputs import Inputs
from loopscale.model.layers import Block, megatron_config
from loopscale.model.readout import NormReadout, make_readout
from loopscale.model.weights import Holder, holders, initial
from loopscale.objective import gate as gates
from loopscale.objective import scale
from loopscale.objective.cross_entropy import linear_cross_entropy
from loopscale.objective.supervision import GATED, Exit
from loopscale.parallel.ring.execute import ExitLoss, Feed
from loopscale.randomness import normals, stream_key, truncated_normals, uniforms


class LoopedStage(nn.Module):
    """The home stage; with one stage, the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        max_positions: int,
        *,
        seed: int,
        objective: ObjectiveConfig | None = None,
        compute: torch.dtype = torch.float32,
        loss_chunk: int = 1024,
        device: torch.device | str = "cpu",
        initialise: bool = True,
    ):
        super().__init__()
        self.model, self.seed, self.compute, self.loss_chunk, self.max_positions = model, seed, compute, loss_chunk, max_positions
        self.objective = objective or ObjectiveConfig()
        d, vocabulary, config = model.hidden_size, model.vocabulary, megatron_config(model)
        self.embedding = VocabParallelEmbedding(vocabulary, d, init_method=nn.init.zeros_, config=config)
        if model.positions == "learned":
            self.positions = nn.Embedding(max_positions, d)
        self.prelude_block = Block(model, config, model.prelude_layers, 0)
        self.injection = make_injection(model)
        self.core_block = Block(model, config, model.core_layers, model.prelude_layers)
        self.between = BETWEEN[model.between](model) if model.between in BETWEEN else None
        self.coda_linear = nn.Linear(d, d, bias=False) if model.coda_linear else None
        self.coda_block = Block(model, config, model.coda_layers, model.prelude_layers + model.core_layers)
        self.readout = make_readout(model)
        self.gate = nn.Linear(d, 1) if model.exit_gate != "none" else None
        if not model.tied_head:
            self.head = ColumnParallelLinear(d, vocabulary, config=config, init_method=nn.init.zeros_, bias=False)
        self.to(device)
        self.rotary = None
        if model.positions == "rope":
            self.rotary = Rotary.build(
                max_positions, model.head_width, model.rope_base, model.rope_interleaved, torch.device(device)
            )
        self._table = holders(model, max_positions)
        if initialise:
            self.initialise()

    # ---- weights under their global names

    def held(self) -> list[tuple[Holder, nn.Parameter]]:
        """Every parameter with the global weights it holds."""
        parameters = dict(self.named_parameters())
        return [(holder, parameters[holder.parameter]) for holder in self._table]

    @torch.no_grad()
    def initialise(self) -> None:
        for holder, parameter in self.held():
            parameter.copy_(holder.join({w.name: initial(w, self.model, self.seed) for w in holder.weights}))

    # ---- what the executor asks for

    def prelude(self, inputs: Inputs) -> Feed:
        """(e if the initial state is e, what injection needs of e), either left out when unused; [S, B, d] fp32."""
        h = self.embedding(inputs.tokens.t().contiguous()) * self.model.embedding_multiplier
        if self.model.positions == "learned":
            h = h + self.positions.weight[: h.shape[0], None]
        if self.model.embedding_dropout and inputs.training:
            h = h * self._dropout(inputs)
        e = self._run(self.prelude_block, h, inputs)
        feed = (e,) if self.model.state_init == "embedding" else ()
        return feed if self.injection is None else (*feed, self.injection.source(e))

    def visit(self, inputs: Inputs, feed: Feed, state: Tensor | None, visit: int) -> Tensor:
        """The state after visit ``visit`` (1-based), from the one before it, or from none at the first."""
        before = self._initial_state(inputs, feed) if state is None else state
        h = before if state is None else self._pass_on(inputs, before, visit)
        if self.injection is not None:
            h = self.injection(h, feed[-1])
        h = self._run(self.core_block, h, inputs)
        if inputs.first_visits is None:
            return h
        return torch.where((inputs.first_visits <= visit)[None, :, None], h, before)

    def exit(self, inputs: Inputs, exit: Exit, states: Mapping[int, Tensor]) -> ExitLoss:
        """The terms of the objective that this exit carries, from the states of ``exit.visits``."""
        targets = inputs.targets.t().flatten()
        if self.objective.kind in GATED:
            tokens, losses = self._gated(inputs, states, targets)
        else:
            decoded = self.decode(inputs, states[exit.visit], exit.visit).flatten(0, 1).to(self.compute)
            total, losses = linear_cross_entropy(decoded, self.head_weight, targets, self.loss_chunk)
            tokens = {"cross_entropy": exit.weight * total}
        sequences = self._scale_terms(inputs, states) if exit.scale_terms else {}
        return ExitLoss(tokens, sequences, losses)

    # ---- shared by training and inference

    def decode(self, inputs: Inputs, state: Tensor, visit: int) -> Tensor:
        """What the head multiplies, of the state after ``visit``; [S, B, d] fp32."""
        shared = self.model.between == "shared"
        h = self.readout(state, True) if shared or self.model.coda_norm else state
        if self.coda_linear is not None:
            h = self.coda_linear(h)
        if shared and not self.model.coda_layers and not self.model.coda_linear:
            return h  # one norm is both decoded and fed on, and applied once
        return self.readout(self._run(self.coda_block, h, inputs), visit >= inputs.final_visit)

    def gate_logits(self, state: Tensor) -> Tensor:
        """log odds of leaving after this visit, [S, B]."""
        assert self.gate is not None
        if self.model.exit_gate == "normed":
            assert isinstance(self.readout, NormReadout)
            state = self.readout(state, True)
        if self.objective.kind == "exit_gate_stage2":
            state = state.detach()  # the language model is frozen
        return self.gate(state).squeeze(-1)

    @property
    def head_weight(self) -> Tensor:
        """[V, d]."""
        return self.embedding.weight if self.model.tied_head else self.head.weight

    def logits(self, decoded: Tensor) -> Tensor:
        """[S, B, d] to [S, B, V], fp32."""
        return (decoded.to(self.compute) @ self.head_weight.to(self.compute).t()).float()

    # ---- parts

    def _gated(self, inputs: Inputs, states: Mapping[int, Tensor], targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Terms of the exit gate summed over scored tokens, and the last visit's loss per token."""
        visits, scored, repeated = len(states), targets >= 0, targets.repeat(len(states))
        if self.objective.kind == "exit_gate_stage2":
            with torch.no_grad():
                rows = torch.cat([self.decode(inputs, h, r).flatten(0, 1) for r, h in states.items()]).to(self.compute)
                _, losses = linear_cross_entropy(rows, self.head_weight, repeated, self.loss_chunk)
            losses = losses.view(visits, -1)
            logits = torch.stack([self.gate_logits(h).flatten() for h in states.values()])
            return {"gate": (gates.continue_loss(logits, losses) * scored).sum()}, losses[-1]
        rows = torch.cat([self.decode(inputs, h, r).flatten(0, 1) for r, h in states.items()]).to(self.compute)
        logits = torch.stack([self.gate_logits(h).flatten() for h in states.values()])
        log_p = gates.exit_log_probabilities(logits)
        total, losses = linear_cross_entropy(rows, self.head_weight, repeated, self.loss_chunk, log_p.exp().flatten())
        spread = -self.objective.gate_entropy * (gates.entropy(log_p) * scored).sum()
        return {"cross_entropy": total, "gate_entropy": spread}, losses.view(visits, -1)[-1]

    def _scale_terms(self, inputs: Inputs, states: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Norm penalty and anchor, weighted, summed over sequences."""
        visits = torch.tensor(list(states), device=inputs.tokens.device)
        starts = torch.ones_like(inputs.samples) if inputs.first_visits is None else inputs.first_visits
        squares = scale.mean_squares(torch.stack(list(states.values())), (visits[:, None] >= starts).float())
        terms = {
            "norm_penalty": self.objective.norm_penalty * squares.sum(),
            "anchor": self.objective.anchor * scale.anchor(squares, self.objective.anchor_target).sum(),
        }
        return {name: term for name, term in terms.items() if getattr(self.objective, name)}

    def _initial_state(self, inputs: Inputs, feed: Feed) -> Tensor:
        kind, d = self.model.state_init, self.model.hidden_size
        if kind == "embedding":
            return feed[0]
        if kind == "zero":
            return torch.zeros(*inputs.tokens.t().shape, d, device=inputs.tokens.device)
        place = self._places(inputs)
        noise = truncated_normals(*place, cut=3.0) if kind == "truncated_normal" else normals(*place)
        return self.model.noise_std * noise

    def _dropout(self, inputs: Inputs) -> Tensor:
        """0 or 1 / (1 − p) per channel, [S, B, d]."""
        p = self.model.embedding_dropout
        return (uniforms(*self._places(inputs, "dropout")) > p).float() / (1 - p)

    def _places(self, inputs: Inputs, purpose: str | None = None) -> tuple[tuple[int, int], Tensor, Tensor, int, int]:
        """Key and counters of one value per position, sample and channel."""
        positions = torch.arange(inputs.tokens.shape[1], device=inputs.samples.device)
        key = stream_key(self.seed, purpose or inputs.purpose)
        return key, positions[:, None], inputs.samples[None], inputs.step, self.model.hidden_size

    def _pass_on(self, inputs: Inputs, state: Tensor, visit: int) -> Tensor:
        """The state as the next visit takes it; a sequence that has not begun keeps its initial one.

        This is the end of the visit before: where that one carries no gradient, neither does this.
        """
        if self.model.between == "none":
            return state
        with torch.set_grad_enabled(torch.is_grad_enabled() and state.requires_grad):
            passed = self.readout(state, True) if self.between is None else self.between(state)
        if inputs.first_visits is None:
            return passed
        return torch.where((inputs.first_visits < visit)[None, :, None], passed, state)

    def _run(self, block: Block, h: Tensor, inputs: Inputs) -> Tensor:
        """``block`` on an fp32 state, in the compute type; norm gains and biases stay fp32."""
        if not len(block.layers):
            return h
        attending = Attending(inputs.documents, self.rotary, inputs.tokens.t())
        if self.compute == torch.float32:
            return block(h, attending)
        cast = {n: p.to(self.compute) if p.dim() > 1 else p for n, p in block.named_parameters()}
        return functional_call(block, cast, (h.to(self.compute), attending)).float()
