"""Paper B's learned depth law: one categorical over 1..cap whose logits follow how well depths predict, at a given mean.

All of it is fp64 arithmetic of Python floats on two sums per depth group, so that ranks that hear the same have the same
logits, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loopscale.config.tree import DepthConfig
from loopscale.depth.controller import GroupSums
from loopscale.depth.priors import Prior, pln

DECAY = 0.95
"""Of the moving means and variances."""
BETAS, EPS = (0.9, 0.999), 1e-8
"""Of Adam."""
LEAST = 1e-12
"""Standard deviations are taken to be no smaller."""


@dataclass
class Moving:
    """Exponential mean and variance of a quantity that a step observes several times, with weights.

    v ← 0.95 v + 0.05 v_within + 0.95 · 0.05 (obs − mean)², mean ← 0.95 mean + 0.05 obs; the first step sets both.
    """

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0

    def add(self, values: Sequence[float], weights: Sequence[float]) -> None:
        """One step's ``values``; ``weights`` add up to 1."""
        seen = math.fsum(w * x for w, x in zip(weights, values, strict=True))
        within = math.fsum(w * (x - seen) ** 2 for w, x in zip(weights, values, strict=True))
        if self.steps == 0:
            self.mean, self.variance = seen, within
        else:
            between = DECAY * (1 - DECAY) * (seen - self.mean) ** 2
            self.variance = DECAY * self.variance + (1 - DECAY) * within + between
            self.mean = DECAY * self.mean + (1 - DECAY) * seen
        self.steps += 1

    @property
    def deviation(self) -> float:
        return max(math.sqrt(self.variance), LEAST)


class LearnedLaw:
    """A :class:`~loopscale.depth.controller.DepthController`. After ``burn_in`` steps every step is one Adam update of the logits
    that lowers

        Σ_j w_j sg[(c_j − β) g] log p(R_j)  +  budget_coef (E[R] − mean)²  −  entropy_coef H(p)

    with c_j = −exp(−CE_j) of depth group j, w_j its share of the step's tokens, β the moving mean of c and g = sd(CE) / sd(c):
    REINFORCE, on the scale of the loss. β and g are those of the steps before: what a step sees does not judge itself.
    """

    def __init__(self, config: DepthConfig):
        self.config = config
        self.logits = [math.log(max(p, 1e-300)) for p in pln(config.mean, config.sigma, config.cap).probabilities]
        self._first, self._second = [0.0] * config.cap, [0.0] * config.cap
        self._updates = 0
        self._loss, self._score = Moving(), Moving()

    def at(self, progress: float) -> Prior:
        return Prior("learned", tuple(softmax(self.logits)))

    def update(self, groups: Sequence[GroupSums]) -> None:
        told = [group for group in groups if group.tokens]
        tokens = sum(group.tokens for group in told)
        if not tokens:
            return
        weights = [group.tokens / tokens for group in told]
        losses = [group.loss / group.tokens for group in told]
        scores = [-math.exp(-loss) for loss in losses]
        if self._score.steps >= self.config.burn_in and self._score.steps > 0:
            scale = self._loss.deviation / self._score.deviation
            pulls = [w * (score - self._score.mean) * scale for w, score in zip(weights, scores, strict=True)]
            self._adam(self.gradient([group.depth for group in told], pulls))
        self._loss.add(losses, weights)
        self._score.add(scores, weights)

    def gradient(self, depths: Sequence[int], pulls: Sequence[float]) -> list[float]:
        """Of the objective by the logits, for drawn ``depths`` whose log-probabilities weigh ``pulls``."""
        p = softmax(self.logits)
        mean = math.fsum(chance * (i + 1) for i, chance in enumerate(p))
        logs = [math.log(chance) if chance > 0 else 0.0 for chance in p]
        negentropy = math.fsum(chance * log for chance, log in zip(p, logs, strict=True))
        off, total = 2 * self.config.budget_coef * (mean - self.config.mean), math.fsum(pulls)
        found = [
            chance * (off * (i + 1 - mean) + self.config.entropy_coef * (log - negentropy) - total)
            for i, (chance, log) in enumerate(zip(p, logs, strict=True))
        ]
        for depth, pull in zip(depths, pulls, strict=True):
            found[depth - 1] += pull
        return found

    def _adam(self, gradient: Sequence[float]) -> None:
        self._updates += 1
        first, second = (1 - beta**self._updates for beta in BETAS)
        for i, g in enumerate(gradient):
            self._first[i] = BETAS[0] * self._first[i] + (1 - BETAS[0]) * g
            self._second[i] = BETAS[1] * self._second[i] + (1 - BETAS[1]) * g * g
            self.logits[i] -= self.config.lr * (self._first[i] / first) / (math.sqrt(self._second[i] / second) + EPS)

    def state(self) -> dict[str, Any]:
        return {
            "logits": list(self.logits), "first": list(self._first), "second": list(self._second), "updates": self._updates,
            "loss": asdict(self._loss), "score": asdict(self._score),
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """An empty state, of a run whose law was another one, leaves the law where it begins."""
        if state:
            self.logits, self._first, self._second = (list(state[key]) for key in ("logits", "first", "second"))
            self._updates = state["updates"]
            self._loss, self._score = Moving(**state["loss"]), Moving(**state["score"])

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.config.model_dump(mode="json"), self.state()]).encode()).hexdigest()


def softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    powers = [math.exp(logit - most) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]
