"""The looped model as the ring's executor runs it: prelude, visits of the shared core, exits.

    e  = prelude(embed(tokens))
    h0 = e, or noise keyed by (seed, step, sample, position)
    h  = core(inject(h, e))            R times
    logits = head(readout(coda(h)))    at an exit

S positions, B sequences, d width, V vocabulary. States travel as fp32 [S, B, d]; inside a visit the weights are cast
to the compute type, so the gradient of every visit reaches the fp32 parameter in fp32.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn
from torch.func import functional_call

from loopscale.config.tree import ModelConfig
from loopscale.model.attention import Attending, Rotary
from loopscale.model.injection import make_injection
from loopscale.model.inputs import Inputs
from loopscale.model.layers import Block, megatron_config
from loopscale.model.norm import RMSNorm
from loopscale.model.weights import Holder, holders, initial
from loopscale.objective.cross_entropy import linear_cross_entropy
from loopscale.parallel.ring.execute import Feed
from loopscale.randomness import normals, stream_key


class LoopedStage(nn.Module):
    """The home stage; with one stage, the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        max_positions: int,
        *,
        seed: int,
        compute: torch.dtype = torch.float32,
        loss_chunk: int = 1024,
        device: torch.device | str = "cpu",
        initialise: bool = True,
    ):
        super().__init__()
        self.model, self.seed, self.compute, self.loss_chunk, self.max_positions = model, seed, compute, loss_chunk, max_positions
        d, vocabulary, config = model.hidden_size, model.vocabulary, megatron_config(model)
        self.embedding = VocabParallelEmbedding(vocabulary, d, init_method=nn.init.zeros_, config=config)
        if model.positions == "learned":
            self.positions = nn.Embedding(max_positions, d)
        self.prelude_block = Block(model, config, model.prelude_layers)
        self.injection = make_injection(model)
        self.core_block = Block(model, config, model.core_layers)
        self.coda_block = Block(model, config, model.coda_layers)
        self.readout = RMSNorm(config, d, model.norm_eps, model.norm_centered) if model.readout == "rmsnorm" else None
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
        h = self.embedding(inputs.tokens.t().contiguous())
        if self.model.positions == "learned":
            h = h + self.positions.weight[: h.shape[0], None]
        e = self._run(self.prelude_block, h, inputs)
        feed = (e,) if self.model.state_init == "embedding" else ()
        return feed if self.injection is None else (*feed, self.injection.source(e))

    def visit(self, inputs: Inputs, feed: Feed, state: Tensor | None) -> Tensor:
        h = self._initial_state(inputs, feed) if state is None else state
        if self.injection is not None:
            h = self.injection(h, feed[-1])
        return self._run(self.core_block, h, inputs)

    def exit(self, inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of the exit: its sum over scored tokens, in nats, and each token's [S * B]."""
        h = self.decode(inputs, state).flatten(0, 1)
        return linear_cross_entropy(h.to(self.compute), self.head_weight, inputs.targets.t().flatten(), self.loss_chunk)

    # ---- shared by training and inference

    def decode(self, inputs: Inputs, state: Tensor) -> Tensor:
        """readout(coda(state)), [S, B, d] fp32."""
        h = self._run(self.coda_block, state, inputs)
        return h if self.readout is None else self.readout(h)

    @property
    def head_weight(self) -> Tensor:
        """[V, d]."""
        return self.embedding.weight if self.model.tied_head else self.head.weight

    def logits(self, decoded: Tensor) -> Tensor:
        """[S, B, d] to [S, B, V], fp32."""
        return (decoded.to(self.compute) @ self.head_weight.to(self.compute).t()).float()

    def _initial_state(self, inputs: Inputs, feed: Feed) -> Tensor:
        if self.model.state_init == "embedding":
            return feed[0]
        positions = torch.arange(inputs.tokens.shape[1], device=inputs.samples.device)
        key = stream_key(self.seed, inputs.purpose)
        return self.model.noise_std * normals(key, positions[:, None], inputs.samples[None], inputs.step, self.model.hidden_size)

    def _run(self, block: Block, h: Tensor, inputs: Inputs) -> Tensor:
        """``block`` on an fp32 state, in the compute type; norm gains stay fp32."""
        if not len(block.layers):
            return h
        attending = Attending(inputs.documents, self.rotary)
        if self.compute == torch.float32:
            return block(h, attending)
        cast = {n: p.to(self.compute) if p.dim() > 1 else p for n, p in block.named_parameters()}
        return functional_call(block, cast, (h.to(self.compute), attending)).float()
