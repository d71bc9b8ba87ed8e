from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from loopscale.corpus.baselines import baselines
from loopscale.corpus.folder import Corpus
from loopscale.corpus.packing import PackedCorpus


def test_losses_are_those_of_counting_by_hand(corpus: Corpus) -> None:
    train = PackedCorpus(corpus.location, "train", 16)
    held = PackedCorpus(corpus.location, "validation", 16)
    samples = [held[i] for i in range(20)]
    inputs = np.stack([s.tokens[:-1].numpy() for s in samples])
    targets = np.stack([s.targets.numpy() for s in samples])

    tokens = train.read(0, train.tokens).tolist()
    starts = set(train.document_starts(train.tokens).tolist())
    single = Counter(tokens)
    pairs = Counter((tokens[i - 1], tokens[i]) for i in range(1, len(tokens)) if i not in starts)
    after: dict[int, Counter[int]] = {}
    for (h, t), n in pairs.items():
        after.setdefault(h, Counter())[t] = n

    def unigram(t: int) -> float:
        return (single[t] + 1) / (len(tokens) + train.vocab_size)

    def bigram(h: int, t: int) -> float:
        seen = after.get(h, Counter())
        if not seen:
            return unigram(t)
        return (seen[t] + len(seen) * unigram(t)) / (seen.total() + len(seen))

    wanted = [(h, t) for h, t in zip(inputs.ravel().tolist(), targets.ravel().tolist(), strict=True) if t != -100]
    assert len(wanted) < inputs.size  # boundaries are among them
    losses = baselines(train, inputs, targets)
    assert losses["unigram"] == pytest.approx(-sum(math.log(unigram(t)) for _, t in wanted) / len(wanted))
    assert losses["bigram"] == pytest.approx(-sum(math.log(bigram(h, t)) for h, t in wanted) / len(wanted))
    assert losses["bigram"] < losses["unigram"]
    assert baselines(corpus.location, inputs, targets) == losses
    assert baselines(train, inputs, targets, limit=500)["bigram"] > losses["bigram"]


def test_bigram_probabilities_sum_to_one(corpus: Corpus) -> None:
    train = PackedCorpus(corpus.location, "train", 1)
    every = np.arange(corpus.vocab_size)
    for history in (0, 40, 399):
        losses = [baselines(train, np.array([history]), np.array([t]))["bigram"] for t in every[:: corpus.vocab_size // 4]]
        assert all(math.isfinite(loss) for loss in losses)
