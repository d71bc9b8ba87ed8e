from __future__ import annotations

import io

import pytest

from loopscale.corpus.folder import Corpus
from loopscale.corpus.order import Order
from loopscale.corpus.packing import PackedCorpus
from loopscale.corpus.show import inspect
from loopscale.errors import UsageError


def test_inspect_prints_statistics_and_marks_documents(corpus: Corpus) -> None:
    out = io.StringIO()
    inspect(corpus.location, count=3, sequence_length=256, out=out)
    text = out.getvalue()
    assert corpus.fingerprint in text and "bpe-400" in text
    assert f"{corpus.split('train').tokens:,} tokens" in text
    packed = PackedCorpus(corpus.location, "train", 256)
    inner = sum(len(packed[i].starts) - 1 for i in range(3))
    assert text.count("\n⟦document⟧\n") == inner > 0
    assert "\nsample 0 · tokens 0 to 256 · " in text


def test_inspect_shows_what_a_seed_reads_first(corpus: Corpus) -> None:
    out = io.StringIO()
    inspect(corpus.location, split="validation", count=1, sequence_length=32, seed=5, out=out)
    first = Order(len(PackedCorpus(corpus.location, "validation", 32)), 5, 65_536)[0]
    assert f"\nsample {first:,} · " in out.getvalue()
    with pytest.raises(UsageError, match="count is -1"):
        inspect(corpus.location, count=-1)
