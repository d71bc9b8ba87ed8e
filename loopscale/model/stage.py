"""The looped model as the ring's executor runs it: prelude, visits of the shared core, exits.

    e  = prelude(embed(tokens))
    h0 = zeros, e, or noise keyed by (seed, step, sample, position)
    h  = core(inject(between(h), e))                 R times; h0 itself does not pass `between`
    logits = head(readout(coda(linear(h))))          at an exit

S positions, B sequences, d width, V vocabulary, N = S * B tokens. States travel as fp32 [S, B, d] (with sequence
parallelism the positions of this rank); inside a visit the weights are cast to the compute type, so the gradient of
every visit reaches the fp32 parameter in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn

from loopscale.config.tree import ModelConfig, ObjectiveConfig
from loopscale.model.attention import Attending, Rotary
from loopscale.model.between import BETWEEN, UnitNorm
from loopscale.model.injection import make_injection
from loopscale.model.inputs import Inputs
from loopscale.model.layers import Block, KernelName, megatron_config
from loopscale.model.readout import NormReadout, make_readout
from loopscale.model.sharing import Sharing
from loopscale.model.weights import Box, Holder, holders, initial, padded_rows
from loopscale.objective import gate as gates
from loopscale.objective import scale
from loopscale.objective.cross_entropy import linear_cross_entropy
from loopscale.objective.supervision import GATED, Exit
from loopscale.parallel.mesh import Place
from loopscale.parallel.ring.execute import ExitLoss, Feed
from loopscale.randomness import normals, stream_key, truncated_normals, uniforms


class LoopedStage(nn.Module):
    """What one rank holds of the model: its stage's slice of the core and, at home, all that is not core; of each layer
    the share of its tensor-parallel rank. By default the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        max_positions: int,
        *,
        seed: int,
        place: Place = Place(),  # noqa: B008  # frozen
        objective: ObjectiveConfig | None = None,
        compute: torch.dtype = torch.float32,
        loss_chunk: int = 1024,
        recompute_layers: bool = False,
        kernels: KernelName = "torch",
        device: torch.device | str = "cpu",
        initialise: bool = True,
    ):
        super().__init__()
        self.model, self.seed, self.compute, self.loss_chunk, self.max_positions = model, seed, compute, loss_chunk, max_positions
        self.objective, self.recompute_layers = objective or ObjectiveConfig(), recompute_layers
        self.is_home, self.sharing = place.is_home, Sharing.at(place)
        own = place.core_layers(model.core_layers)
        self.core_block = Block(model, self.sharing, own, model.prelude_layers, kernels)
        if self.is_home:
            self._build_home(model, kernels)
        self.to(device)
        self.rotary = None
        if model.positions == "rope":
            self.rotary = Rotary.build(
                max_positions, model.head_width, model.rope_base, model.rope_interleaved, torch.device(device)
            )
        self.table = holders(model, max_positions)
        if initialise:
            self.initialise()
        else:
            self._clear_padding()

    def _build_home(self, model: ModelConfig, kernels: KernelName) -> None:
        d, sharing = model.hidden_size, self.sharing
        rows, config = padded_rows(model.vocabulary, sharing.size), megatron_config(model, sharing)
        self.embedding = VocabParallelEmbedding(
            rows, d, init_method=nn.init.zeros_, reduce_scatter_embeddings=sharing.by_position, config=config
        )
        if model.positions == "learned":
            self.positions = nn.Embedding(self.max_positions, d)
        self.prelude_block = Block(model, sharing, range(model.prelude_layers), 0, kernels)
        self.injection = make_injection(model)
        self.between = BETWEEN[model.between](model) if model.between in BETWEEN else None
        self.coda_linear = nn.Linear(d, d, bias=False) if model.coda_linear else None
        before_coda = model.prelude_layers + model.core_layers
        self.coda_block = Block(model, sharing, range(model.coda_layers), before_coda, kernels)
        self.readout = make_readout(model)
        self.gate = nn.Linear(d, 1) if model.exit_gate != "none" else None
        if not model.tied_head:
            self.head = ColumnParallelLinear(d, rows, config=config, init_method=nn.init.zeros_, bias=False)

    # ---- weights under their global names

    def held(self) -> list[tuple[Holder, nn.Parameter]]:
        """Every parameter here with the global weights that it holds, or shares; the whole model's are in ``table``."""
        parameters = dict(self.named_parameters())
        return [(holder, parameters[holder.parameter]) for holder in self.table if holder.parameter in parameters]

    def boxes(self, holder: Holder, first: int = 0, end: int | None = None) -> Iterator[Box]:
        """What elements ``first`` to ``end`` of a parameter here, flat, are of the global weights."""
        return holder.boxes(self.sharing.rank, self.sharing.size, first, end)

    @torch.no_grad()
    def initialise(self) -> None:
        for holder, parameter in self.held():
            self.fill(holder, parameter, {w.name: initial(w, self.model, self.seed) for w in holder.weights})

    @torch.no_grad()
    def fill(self, holder: Holder, parameter: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Sets a parameter here from whole global weights, by name; its padding to zero."""
        parameter.zero_()
        for box, here in holder.views(parameter, self.sharing.rank, self.sharing.size):
            here.copy_(weights[box.weight.name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """No weight is loaded into it, and a gradient of 0 times a NaN of memory that nobody wrote would be a NaN."""
        for holder, parameter in self.held():
            if holder.padded:
                parameter.zero_()

    # ---- what the executor asks for

    def state_shape(self, inputs: Inputs) -> tuple[int, int, int]:
        """[S, B, d], S the positions held here."""
        batch, length = inputs.tokens.shape
        own = self.sharing.own_positions(length)
        return own.stop - own.start, batch, self.model.hidden_size

    def prelude(self, inputs: Inputs) -> Feed:
        """(e if the initial state is e, what injection needs of e), either left out when unused; [S, B, d] fp32."""
        tokens = inputs.tokens if self.sharing.by_position else inputs.tokens.t().contiguous()  # it turns them itself
        h = self.embedding(tokens) * self.model.embedding_multiplier
        if self.model.positions == "learned":
            h = h + self.positions.weight[self.sharing.own_positions(inputs.tokens.shape[1]), None]
        if self.model.embedding_dropout and inputs.training:
            h = h * self._dropout(inputs)
        e = self._run(self.prelude_block, h, inputs)
        feed = (e,) if self.model.state_init == "embedding" else ()
        return feed if self.injection is None else (*feed, self.injection.source(e))

    def visit(self, inputs: Inputs, feed: Feed, state: Tensor | None, visit: int) -> Tensor:
        """The state as this stage leaves it in visit ``visit`` (1-based); home begins from the state after the visit before,
        or from none at the first, the other stages go on with what the stage before them left."""
        before = self._initial_state(inputs, feed) if state is None else state
        h = before
        if self.is_home:
            h = before if state is None else self._pass_on(inputs, before, visit)
            h = h if self.injection is None else self.injection(h, feed[-1])
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
            total, losses = self._cross_entropy([self.decode(inputs, states[exit.visit], exit.visit)], targets)
            tokens = {"cross_entropy": exit.weight * total}
        sequences = self._scale_terms(inputs, states) if exit.scale_terms else {}
        return ExitLoss(tokens, sequences, losses)

    # ---- shared by training and inference

    def decode(self, inputs: Inputs, state: Tensor, visit: int) -> Tensor:
        """What the head multiplies, of the state after ``visit``; [S, B, d] fp32."""
        shared = self.model.between == "shared"
        h = self.readout(state, True) if shared or self.model.coda_norm else state
        if isinstance(self.between, UnitNorm):
            h = self.between(h)
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
        """[V, d], padded, or this rank's share of those rows."""
        return self.embedding.weight if self.model.tied_head else self.head.weight

    def logits(self, decoded: Tensor) -> Tensor:
        """[S, B, d] to [S, B, V], fp32, where one rank holds the whole head."""
        weight = self.head_weight[: self.model.vocabulary]
        return (decoded.to(self.compute) @ weight.to(self.compute).t()).float()

    # ---- parts

    def _gated(self, inputs: Inputs, states: Mapping[int, Tensor], targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Terms of the exit gate summed over scored tokens, and the last visit's loss per token."""
        visits, scored, repeated = len(states), targets >= 0, targets.repeat(len(states))
        if self.objective.kind == "exit_gate_stage2":
            with torch.no_grad():
                _, losses = self._cross_entropy([self.decode(inputs, h, r) for r, h in states.items()], repeated)
            losses = losses.view(visits, -1)
            return {"gate": (gates.continue_loss(self._gates(states), losses) * scored).sum()}, losses[-1]
        decoded = [self.decode(inputs, h, r) for r, h in states.items()]
        log_p = gates.exit_log_probabilities(self._gates(states))
        total, losses = self._cross_entropy(decoded, repeated, log_p.exp().flatten())
        spread = -self.objective.gate_entropy * (gates.entropy(log_p) * scored).sum()
        return {"cross_entropy": total, "gate_entropy": spread}, losses.view(visits, -1)[-1]

    def _gates(self, states: Mapping[int, Tensor]) -> Tensor:
        """log odds of leaving after each visit for every token of all positions, [visits, N]."""
        return torch.stack([self.sharing.whole(self.gate_logits(h)).flatten() for h in states.values()])

    def _cross_entropy(
        self, decoded: Sequence[Tensor], targets: Tensor, row_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sum and losses of decoded states, one after the other; see :func:`linear_cross_entropy`."""
        rows = torch.cat([self.sharing.enter(h).flatten(0, 1) for h in decoded]).to(self.compute)
        share = self.sharing.vocabulary(len(self.head_weight), self.model.vocabulary)
        return linear_cross_entropy(rows, self.head_weight, targets, self.loss_chunk, row_weights, share)

    def _scale_terms(self, inputs: Inputs, states: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Norm penalty and anchor, weighted, summed over sequences."""
        visits = torch.tensor(list(states), device=inputs.tokens.device)
        starts = torch.ones_like(inputs.samples) if inputs.first_visits is None else inputs.first_visits
        active, length = (visits[:, None] >= starts).float(), inputs.tokens.shape[1]
        squares = self.sharing.total(scale.mean_squares(torch.stack(list(states.values())), active, length))
        terms = {
            "norm_penalty": self.objective.norm_penalty * squares.sum(),
            "anchor": self.objective.anchor * scale.anchor(squares, self.objective.anchor_target).sum(),
        }
        return {name: term for name, term in terms.items() if getattr(self.objective, name)}

    def _initial_state(self, inputs: Inputs, feed: Feed) -> Tensor:
        kind = self.model.state_init
        if kind == "embedding":
            return feed[0]
        if kind == "zero":
            return torch.zeros(self.state_shape(inputs), device=inputs.tokens.device)
        place = self._places(inputs)
        noise = truncated_normals(*place, cut=3.0) if kind == "truncated_normal" else normals(*place)
        return self.model.noise_std * noise

    def _dropout(self, inputs: Inputs) -> Tensor:
        """0 or 1 / (1 − p) per channel, [S, B, d]."""
        p = self.model.embedding_dropout
        return (uniforms(*self._places(inputs, "dropout")) > p).float() / (1 - p)

    def _places(self, inputs: Inputs, purpose: str | None = None) -> tuple[tuple[int, int], Tensor, Tensor, int, int]:
        """Key and counters of one value per position, sample and channel."""
        own = self.sharing.own_positions(inputs.tokens.shape[1])
        positions = torch.arange(own.start, own.stop, device=inputs.samples.device)
        key = stream_key(self.seed, purpose or inputs.purpose)
        return key, positions[:, None], inputs.samples[None], inputs.step, self.model.hidden_size

    def finished(self, inputs: Inputs) -> None:
        """Lets the mask of these inputs go."""
        inputs.documents.forget_mask()

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
        if not len(block.layers):
            return h
        attending = Attending(inputs.documents, self.rotary, inputs.tokens.t())
        return block(h, attending, self.compute, self.recompute_layers)
