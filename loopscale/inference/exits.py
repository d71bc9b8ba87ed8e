"""Early exit: sequences leave the loop at different visits, and what has left costs nothing more.

After every visit but the last, which all leave, a rule gives each sequence a score; it leaves at the first that reaches the
rule's threshold. Scores are means over all S positions of a sequence, for a rule knows no targets. S positions, B sequences,
d width, V vocabulary, K visits.

margin    the likeliest token's logit less the next one's (Paper A)
kl        −KL(p_r ‖ p_{r−1}) of the next-token distributions in nats; none at the first visit (Huginn, there per token)
gate      1 − Π_{j≤r} (1 − λ_j): the probability, by the exit gate, of having left (Ouro, there per token)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscale.config.tree import ModelConfig
from loopscale.model.inputs import Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.cross_entropy import IGNORED

TARGET = 1.01
"""Perplexity that early exit may cost, over that of depth K (Paper A)."""
QUANTILES = 51
"""Thresholds that are tried (Paper A)."""
NEVER = math.inf
"""The threshold that no score reaches."""


@dataclass(frozen=True)
class Visited:
    """Sequences after visit ``visit``; ``state`` [S, B, d]."""

    stage: LoopedStage
    inputs: Inputs
    state: Tensor
    visit: int

    @cached_property
    def logits(self) -> Tensor:
        """[S, B, V] fp32, by the readout of this visit."""
        return self.stage.logits(self.stage.decode(self.inputs, self.state, self.visit))

    def logits_of(self, leaving: Tensor) -> Tensor:
        """Those of the sequences that bool [B] names; decodes them alone if the rule has not decoded all."""
        if leaving.all():
            return self.logits
        if "logits" in vars(self):
            return self.logits[:, leaving]
        return Visited(self.stage, self.inputs.select(leaving), self.state[:, leaving], self.visit).logits


Score = Callable[[Visited, Tensor | None], tuple[Tensor, Tensor | None]]
"""(after a visit, what the visit before left to remember) -> scores [B], what to remember, whose second axis is B."""


def margin(now: Visited, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
    first, second = now.logits.topk(2, dim=-1).values.unbind(-1)
    return (first - second).mean(0), None


def kl(now: Visited, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Remembers log p, [S, B, V]."""
    log_p = now.logits.log_softmax(-1)
    if memory is None:
        return log_p.new_full((log_p.shape[1],), -math.inf), log_p
    divergence = log_p.exp().mul_(log_p - memory).sum(-1)  # F.kl_div takes more than twice as long
    return -divergence.mean(0), log_p


def gate(now: Visited, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Remembers the log probability of having stayed, [S, B]. Needs no logits."""
    stayed = F.logsigmoid(-now.stage.gate_logits(now.state))
    stayed = stayed if memory is None else memory + stayed
    return -torch.expm1(stayed).mean(0), stayed


def rules(model: ModelConfig) -> Mapping[str, Score]:
    """Those that a model can be asked for: ``gate`` where it has one."""
    return {"margin": margin, "kl": kl} | ({} if model.exit_gate == "none" else {"gate": gate})


@dataclass(frozen=True)
class Rule:
    score: Score
    threshold: float


@dataclass(frozen=True)
class Left:
    """Sequences ``rows`` (int64 [n], of the batch) that left after visit ``visit``, and their ``logits`` [S, n, V] there."""

    visit: int
    rows: Tensor
    logits: Tensor


@torch.no_grad()
def run(stage: LoopedStage, inputs: Inputs, depth: int, rule: Rule | None = None) -> Iterator[Left]:
    """The sequences as they leave, all of them after ``depth`` visits at the latest; without a rule all of them then. Each
    leaves with what the whole batch, run to its visit and decoded there, would give it. For stages that have the whole model."""
    feed, state, memory = stage.prelude(inputs), None, None
    rows = torch.arange(len(inputs.tokens), device=inputs.tokens.device)
    for visit in range(1, depth):
        state = stage.visit(inputs, feed, state, visit)
        if rule is None:
            continue
        now = Visited(stage, inputs, state, visit)
        scores, memory = rule.score(now, memory)
        leaving = scores >= rule.threshold
        if not leaving.any():
            continue
        yield Left(visit, rows[leaving], now.logits_of(leaving))
        stay = ~leaving
        if not stay.any():
            return
        rows, inputs, state, feed = rows[stay], inputs.select(stay), state[:, stay], tuple(f[:, stay] for f in feed)
        memory = None if memory is None else memory[:, stay]
    state = stage.visit(inputs, feed, state, depth)
    yield Left(depth, rows, Visited(stage, inputs, state, depth).logits)


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ cross entropy over the scored tokens of each sequence in nats, fp64 [n]; ``logits`` [S, n, V], ``targets`` [n, S]."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.t().flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(len(logits), -1).sum(0, dtype=torch.float64)


@torch.no_grad()
def look(stage: LoopedStage, inputs: Inputs, depth: int, scores: Mapping[str, Score]) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses after every visit, as of :func:`losses_of`, [depth, B], and each rule's scores after all but the last,
    [depth − 1, B]; both fp64. Nobody leaves."""
    feed, state = stage.prelude(inputs), None
    memories: dict[str, Tensor | None] = dict.fromkeys(scores)
    losses: list[Tensor] = []
    found: dict[str, list[Tensor]] = {name: [] for name in scores}
    for visit in range(1, depth + 1):
        state = stage.visit(inputs, feed, state, visit)
        now = Visited(stage, inputs, state, visit)
        losses.append(losses_of(now.logits, inputs.targets))
        for name, score in scores.items() if visit < depth else ():
            given, memories[name] = score(now, memories[name])
            found[name].append(given.double())
    return torch.stack(losses), {name: torch.stack(given) for name, given in found.items()}


# ---- where a rule's threshold should be


def leave_at(scores: Tensor, threshold: float) -> Tensor:
    """The visit after which each sequence leaves, int64 [N]; ``scores`` [K − 1, N]."""
    stays = ~(scores >= threshold)  # also where the score is not a number
    return 1 + stays.long().cumprod(0).sum(0)


def calibrate(scores: Tensor, losses: Tensor, tokens: int, target: float = TARGET) -> float:
    """The threshold that needs the fewest visits on average among those whose perplexity is at most ``target`` times that of
    leaving after visit K; :data:`NEVER` where none is. ``scores`` fp64 [K − 1, N], ``losses`` fp64 [K, N], both as of
    :func:`look`, over ``tokens`` scored tokens. Tried are 51 quantiles of the scores (Paper A)."""
    known = scores[scores.isfinite()]
    if not len(known):
        return NEVER
    allowed = losses[-1].sum() + tokens * math.log(target)
    fewest, chosen = float(len(losses)), NEVER
    for threshold in known.quantile(torch.linspace(0, 1, QUANTILES, dtype=known.dtype, device=known.device)).tolist():
        left = leave_at(scores, threshold)
        mean = float(left.double().mean())
        if mean < fewest and losses.gather(0, left[None] - 1).sum() <= allowed:
            fewest, chosen = mean, threshold
    return chosen
