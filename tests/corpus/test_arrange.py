from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loopscale.corpus.arrange import ROW, arrange, digests
from loopscale.corpus.documents import Document
from loopscale.errors import DataError


def rows_of(count: int, seed: int = 1, source: int = 0) -> NDArray[np.void]:
    texts = [f"document {i}" for i in range(count)]
    found = [digests(Document("a", i, t), t.encode(), source, seed) for i, t in enumerate(texts)]
    return np.array([(s, o, 0, 100 + i) for i, (s, o) in enumerate(found)], ROW)


@given(st.integers(2, 80), st.integers(0, 1000), st.floats(0.01, 0.49))
def test_every_document_is_placed_once(count: int, seed: int, share: float) -> None:
    rows = rows_of(count, seed)
    zeros = np.zeros(count, np.int64)
    pieces = arrange(rows, zeros, zeros, share, None)
    placed = np.concatenate([p.rows["bytes"] for p in pieces])
    assert sorted(placed) == sorted(rows["bytes"])
    assert {p.split for p in pieces} == {"train", "validation"}


def test_a_document_s_side_does_not_depend_on_the_others() -> None:
    few, many = rows_of(100), rows_of(1000)
    sides = []
    for rows in (few, many):
        zeros = np.zeros(len(rows), np.int64)
        held = [p.rows["split"] for p in arrange(rows, zeros, zeros, 0.2, None) if p.split == "validation"]
        sides.append(set(np.concatenate(held).tolist()))
    assert sides[0] == sides[1] & set(few["split"].tolist())
    assert 150 < len(sides[1]) < 250


def test_a_weighted_source_without_training_text_is_refused() -> None:
    rows = rows_of(20)
    zeros = np.zeros(20, np.int64)
    with pytest.raises(DataError, match="source 2 has weight 3 and no training documents"):
        arrange(rows, zeros, zeros, 0.2, [1.0, 3.0])
