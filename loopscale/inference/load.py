"""``loopscale.load``: a checkpoint as a model to call."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loopscale.checkpoint.restore import Restored, restore
from loopscale.errors import UsageError
from loopscale.model.inputs import Documents, Inputs


@dataclass(frozen=True)
class Output:
    """``logits`` [batch, sequence, vocabulary] fp32; ``states``, if asked for, the state after every visit, each
    [batch, sequence, width]."""

    logits: Tensor
    states: tuple[Tensor, ...] = ()


class LoopedModel:
    """A looped model in evaluation: call it at any depth, or let it write."""

    def __init__(self, restored: Restored):
        self.config = restored.config
        self.notes = restored.notes
        """A sentence for each newer checkpoint that is damaged."""
        self._stage = restored.stage
        self.tokenizer, self.end_of_text = restored.tokenizer, restored.end_of_text

    @torch.no_grad()
    def __call__(self, tokens: Tensor, depth: int | None = None, states: bool = False) -> Output:
        """Logits of ``tokens`` (int64 [batch, sequence], each row one document) after ``depth`` visits.

        ``depth`` defaults to the training mean. Raises :class:`UsageError` for a sequence that is longer than the
        model was trained on, tokens that are not of its vocabulary, or a depth below 1.
        """
        depth = self.config.depth.evaluation_depth if depth is None else depth
        self._check(tokens, depth)
        inputs = self._inputs(tokens)
        feed, state, kept = self._stage.prelude(inputs), None, []
        for r in range(1, depth + 1):
            state = self._stage.visit(inputs, feed, state, r)
            if states:
                kept.append(state.transpose(0, 1))
        assert state is not None
        logits = self._stage.logits(self._stage.decode(inputs, state, depth)).transpose(0, 1)
        return Output(logits, tuple(kept))

    def generate(
        self,
        prompt: str,
        depth: int | None = None,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 1,
    ) -> str:
        """``prompt`` and what follows it, up to the end of the document; the last tokens that fit are the context.

        Tokens are sampled among the ``top_k`` likeliest, or taken greedily when ``temperature`` is 0.
        """
        if not prompt or not _is_text(prompt):
            raise UsageError("the prompt must be text, at least one character of it")
        if not 0 <= temperature < math.inf or max_new_tokens < 0 or (top_k is not None and top_k < 1) or not 0 <= seed < 2**63:
            raise UsageError(
                "temperature must be a number of at least 0, max_new_tokens at least 0, top_k at least 1, seed from 0 to 2^63 - 1"
            )
        given = self.tokenizer.encode(prompt).ids
        tokens = list(given)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(max_new_tokens):
            context = torch.tensor([tokens[-self._stage.max_positions :]])
            logits = self(context, depth).logits[0, -1].cpu()
            token = _choose(logits, temperature, top_k, generator)
            if token == self.end_of_text:
                break
            tokens.append(token)
        return prompt + self.tokenizer.decode(tokens[len(given) :])

    def _check(self, tokens: Tensor, depth: int) -> None:
        longest, vocabulary = self._stage.max_positions, self.config.model.vocabulary
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
            raise UsageError("tokens must be an int64 tensor [batch, sequence]")
        if not len(tokens) or not 1 <= tokens.shape[1] <= longest:
            raise UsageError(f"tokens must be [batch, sequence] with 1 to {longest} tokens a row, not {list(tokens.shape)}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise UsageError(f"tokens must be 0 to {vocabulary - 1}, and go from {int(tokens.min())} to {int(tokens.max())}")
        if not isinstance(depth, int) or depth < 1:
            raise UsageError(f"depth must be a whole number of at least 1, not {depth!r}")

    def _inputs(self, tokens: Tensor) -> Inputs:
        device = self._stage.head_weight.device
        tokens = tokens.to(device)
        rows = torch.arange(len(tokens), device=device)
        documents = Documents.whole(tokens.shape[0], tokens.shape[1], device)
        final = self.config.depth.evaluation_depth
        return Inputs(tokens, tokens, documents, rows, purpose="evaluation", final_visit=final)


def load(path: str | Path) -> LoopedModel:
    """The model of a checkpoint, or of a run's newest whole one; newer ones that are damaged are warned of.

    Raises :class:`UsageError` when there is none there.
    """
    model = LoopedModel(restore(path))
    for note in model.notes:
        warnings.warn(note, stacklevel=2)
    return model


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k or len(logits), len(logits)))
    shifted = (values - values[0]).double() / temperature  # the likeliest at 0: nothing overflows
    return int(indices[torch.multinomial(shifted.softmax(-1), 1, generator=generator)])


def _is_text(prompt: str) -> bool:
    """Whether it can be written as UTF-8; arguments that are not arrive as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True
