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
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from loopscale.config.tree import DepthConfig
from loopscale.depth.controller import GroupSums
from loopscale.depth.priors import Prior, pln
from loopscale.errors import CheckpointError, UsageError

DECAY = 0.95
"""Of the moving means and variances."""
BETAS, EPS = (0.9, 0.999), 1e-8
"""Of Adam."""
SIGNAL_DECAY = 0.99
"""Of the means that tell signal from noise."""
LEAST = 1e-12
"""Standard deviations are taken to be no smaller."""


Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass
class Moving:
    """Exponential mean and variance of a quantity that a step observes several times, with weights.

    v ← 0.95 v + 0.05 v_within + 0.95 · 0.05 (obs − mean)², mean ← 0.95 mean + 0.05 obs; the first step sets both.
    """

    mean: Finite = 0.0
    variance: Finite = 0.0
    steps: Count = 0

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


@dataclass
class Signal:
    """How much of a gradient estimate is signal, from moving means of it and of its squared norm, decay d = 0.99."""

    mean: list[Finite]
    square: Finite = 0.0
    steps: Count = 0

    def add(self, gradient: Sequence[float]) -> None:
        self.mean = [SIGNAL_DECAY * m + (1 - SIGNAL_DECAY) * g for m, g in zip(self.mean, gradient, strict=True)]
        self.square = SIGNAL_DECAY * self.square + (1 - SIGNAL_DECAY) * math.fsum(g * g for g in gradient)
        self.steps += 1

    @property
    def to_noise(self) -> float | None:
        """‖μ‖² / tr Σ of one step's estimate g, E[g] = μ and Cov[g] = Σ taken as constant; None while it cannot be told.

        With weights w of sum 1 over n steps and k = Σ w² = (1 − d)/(1 + d) · (1 + dⁿ)/(1 − dⁿ), the squared norm of the mean has
        the expectation ‖μ‖² + k tr Σ, and the mean of squared norms ‖μ‖² + tr Σ.
        """
        left = SIGNAL_DECAY**self.steps
        if self.steps < 2:
            return None
        of_mean, square = math.fsum((m / (1 - left)) ** 2 for m in self.mean), self.square / (1 - left)
        k = (1 - SIGNAL_DECAY) / (1 + SIGNAL_DECAY) * (1 + left) / (1 - left)
        noise = (square - of_mean) / (1 - k)
        return max(of_mean - k * noise, 0.0) / noise if noise > 0 else None


@dataclass
class LearnedState:
    """What moves in a law, and what a checkpoint has of it: logits, Adam's moments, and what is known of the feedback."""

    logits: list[Finite]
    first: list[Finite]
    second: list[Finite]
    updates: Count
    loss: Moving
    score: Moving
    signal: Signal


class LearnedLaw:
    """A :class:`~loopscale.depth.controller.DepthController`. After ``burn_in`` steps every step is one Adam update of the logits
    that lowers

        Σ_j w_j sg[(c_j − β) g] log p(R_j)  +  budget_coef (E[R] − mean)²  −  entropy_coef H(p)

    with c_j = −exp(−CE_j) of depth group j, w_j its share of the step's tokens, β the moving mean of c and g = sd(CE) / sd(c):
    REINFORCE, on the scale of the loss. β and g are those of the steps before: what a step sees does not judge itself. With
    ``baseline: leave_one_out`` β is the mean of the step's other groups; with ``budget: flops`` the core's training operations
    of R visits stand for R.
    """

    def __init__(self, config: DepthConfig):
        self.config = config
        start = pln(config.mean, config.sigma, config.cap).probabilities
        self._costs = [cost(config, depth) for depth in range(1, config.cap + 1)]
        self._budget = config.mean
        if config.budget == "flops":
            self._budget = math.fsum(p * c for p, c in zip(start, self._costs, strict=True))
        logits, zeros = [math.log(max(p, 1e-300)) for p in start], [0.0] * config.cap
        self._own = LearnedState(logits, zeros.copy(), zeros.copy(), 0, Moving(), Moving(), Signal(zeros))

    @property
    def logits(self) -> list[float]:
        return self._own.logits

    def at(self, progress: float) -> Prior:
        return Prior("learned", tuple(softmax(self.logits)))

    def update(self, groups: Sequence[GroupSums]) -> None:
        told = [group for group in groups if group.tokens]
        tokens = sum(group.tokens for group in told)
        if not tokens:
            return
        own = self._own
        weights = [group.tokens / tokens for group in told]
        losses = [group.loss / group.tokens for group in told]
        scores = [-math.exp(-loss) for loss in losses]
        if own.score.steps >= self.config.burn_in and own.score.steps > 0:
            scale = own.loss.deviation / own.score.deviation
            baselines = self._baselines(scores, weights)
            pulls = [w * (score - base) * scale for w, score, base in zip(weights, scores, baselines, strict=True)]
            feedback = self.feedback_gradient([group.depth for group in told], pulls)
            own.signal.add(feedback)
            self._adam([f + h for f, h in zip(feedback, self.holding_gradient(), strict=True)])
        own.loss.add(losses, weights)
        own.score.add(scores, weights)

    def _baselines(self, scores: Sequence[float], weights: Sequence[float]) -> list[float]:
        if self.config.baseline == "moving" or len(scores) == 1:
            return [self._own.score.mean] * len(scores)
        total = math.fsum(w * score for w, score in zip(weights, scores, strict=True))
        return [(total - w * score) / (1 - w) for w, score in zip(weights, scores, strict=True)]

    def feedback_gradient(self, depths: Sequence[int], pulls: Sequence[float]) -> list[float]:
        """∂/∂ℓ Σ_j pull_j log p(R_j), for drawn ``depths`` R_j."""
        total = math.fsum(pulls)
        found = [-chance * total for chance in softmax(self.logits)]
        for depth, pull in zip(depths, pulls, strict=True):
            found[depth - 1] += pull
        return found

    def holding_gradient(self) -> list[float]:
        """∂/∂ℓ of what holds the budget and the entropy."""
        p = softmax(self.logits)
        spent = math.fsum(chance * c for chance, c in zip(p, self._costs, strict=True))
        logs = [math.log(chance) if chance > 0 else 0.0 for chance in p]
        negentropy = math.fsum(chance * log for chance, log in zip(p, logs, strict=True))
        off, entropy = 2 * self.config.budget_coef * (spent - self._budget), self.config.entropy_coef
        return [
            chance * (off * (c - spent) + entropy * (log - negentropy))
            for chance, c, log in zip(p, self._costs, logs, strict=True)
        ]

    def _adam(self, gradient: Sequence[float]) -> None:
        own = self._own
        own.updates += 1
        first, second = (1 - beta**own.updates for beta in BETAS)
        for i, g in enumerate(gradient):
            own.first[i] = BETAS[0] * own.first[i] + (1 - BETAS[0]) * g
            own.second[i] = BETAS[1] * own.second[i] + (1 - BETAS[1]) * g * g
            own.logits[i] -= self.config.lr * (own.first[i] / first) / (math.sqrt(own.second[i] / second) + EPS)

    def figures(self) -> dict[str, float]:
        """``feedback_snr``: see :attr:`Signal.to_noise`; many steps of one sign are needed where it is far below 1."""
        snr = self._own.signal.to_noise
        return {} if snr is None else {"feedback_snr": snr}

    def state(self) -> dict[str, Any]:
        return asdict(self._own)

    def load(self, state: Mapping[str, Any]) -> None:
        """An empty state, of a run whose law was another one, leaves the law where it begins. Raises :class:`UsageError` for one
        over other depths, :class:`CheckpointError` for what is no state."""
        if not state:
            return
        try:
            own = TypeAdapter(LearnedState).validate_python(state)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"the checkpoint's law is damaged: {place} is {first['input']!r:.60}: {first['msg']}") from None
        depths = {len(own.logits), len(own.first), len(own.second), len(own.signal.mean)}
        if depths != {self.config.cap}:
            raise UsageError(
                f"the law was learned over depths up to {len(own.logits)}, and depth.cap is {self.config.cap}; a learned law "
                f"keeps its cap: use depth.cap={len(own.logits)}"
            )
        self._own = own

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.config.model_dump(mode="json"), self.state()]).encode()).hexdigest()


def cost(config: DepthConfig, depth: int) -> float:
    """What ``depth`` visits take of the budget: themselves, or by ``budget: flops`` their training operations in those of one
    with gradient, 6 a weight and token where a visit without gradient takes 2."""
    if config.budget == "visits":
        return depth
    differentiated = config.gradient_visits(depth)
    return differentiated + (depth - differentiated) / 3


def softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    powers = [math.exp(logit - most) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]
