"""What counting alone achieves on the same tokens: unigram and bigram losses, from training counts.

Unigram: p(t) = (c(t) + 1) / (T + V). Bigram: p(t | h) = (c(h,t) + n(h) p(t)) / (c(h) + n(h)) with n(h) the number of
different tokens seen after h: Witten-Bell smoothing (1991), which has no parameter to choose.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopscale.corpus.packing import IGNORED, PackedCorpus

BIGRAM_TOKENS = 1 << 24
"""Training tokens, from the beginning of the corpus, that bigrams are counted on (some 0.5 GB at work)."""


def baselines(
    train: PackedCorpus | str | Path, inputs: NDArray[np.int64], targets: NDArray[np.int64], *, limit: int = BIGRAM_TOKENS
) -> dict[str, float]:
    """Mean losses in nats per token, {"unigram": …, "bigram": …}, of ``targets`` given ``inputs`` (of one shape).

    Targets of -100 do not count. ``train`` is the training split or its corpus; ``exp`` of a loss is its perplexity.
    """
    packed = train if isinstance(train, PackedCorpus) else PackedCorpus(train, "train", 1)
    valid = targets != IGNORED
    before, after = inputs[valid], targets[valid]
    counts = packed.unigram_counts()
    unigram = (counts + 1) / (counts.sum() + packed.vocab_size)
    bigram = _bigram_probabilities(*_pairs(packed, limit), before, after, unigram)
    return {"unigram": float(-np.log(unigram[after]).mean()), "bigram": float(-np.log(bigram).mean())}


def _pairs(packed: PackedCorpus, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different (token, next) pairs within documents, as token * V + next in ascending order, and their counts."""
    tokens = packed.read(0, min(limit, packed.tokens))
    within = np.ones(len(tokens) - 1, bool)
    within[packed.document_starts(len(tokens))[1:] - 1] = False
    pairs = tokens[:-1] * packed.vocab_size + tokens[1:]
    return np.unique(pairs[within], return_counts=True)


def _bigram_probabilities(
    pairs: NDArray[np.int64],
    counts: NDArray[np.int64],
    before: NDArray[np.int64],
    after: NDArray[np.int64],
    unigram: NDArray[np.float64],
) -> NDArray[np.float64]:
    history = pairs // len(unigram)
    seen = np.bincount(history, weights=counts, minlength=len(unigram))
    kinds = np.bincount(history, minlength=len(unigram))
    wanted = before * len(unigram) + after
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    count = np.where(pairs[place] == wanted, counts[place], 0)
    total = seen[before] + kinds[before]
    smoothed = (count + kinds[before] * unigram[after]) / np.maximum(total, 1)
    return np.where(total > 0, smoothed, unigram[after])
