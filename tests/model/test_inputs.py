"""Part of a microbatch is those sequences and their documents."""

from __future__ import annotations

import pytest
import torch

from loopscale.model.inputs import Documents, Inputs

STARTS = [[0], [0, 2], [0, 1, 3]]
BOUNDARIES = [0, 4, 6, 8, 9, 11, 12]


@pytest.mark.parametrize(
    ("kept", "boundaries", "several"),
    [
        ([True, True, True], BOUNDARIES, [1, 2]),
        ([False, True, True], [0, 2, 4, 5, 7, 8], [0, 1]),
        ([True, False, True], [0, 4, 5, 7, 8], [1]),
        ([True, False, False], [0, 4], []),
    ],
)
def test_selected_sequences_keep_their_documents(kept, boundaries, several):
    found = Documents(torch.tensor(BOUNDARIES, dtype=torch.int32), 3, 4).select(torch.tensor(kept))
    assert found.boundaries.tolist() == boundaries
    assert found.boundaries.dtype == torch.int32
    assert (found.batch, found.length) == (sum(kept), 4)
    assert found.rows[1].tolist() == several


def test_selected_sequences_keep_what_they_are_keyed_by():
    tokens, documents = torch.arange(12).view(3, 4), Documents(torch.tensor(BOUNDARIES, dtype=torch.int32), 3, 4)
    inputs = Inputs(tokens, tokens + 1, documents, torch.tensor([7, 30, 5]), 9, "evaluation", 6, torch.tensor([1, 2, 3]))
    found = inputs.select(torch.tensor([True, False, True]))
    assert found.tokens.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert found.targets.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert found.samples.tolist() == [7, 5]
    assert found.first_visits.tolist() == [1, 3]
    assert (found.step, found.purpose, found.final_visit) == (9, "evaluation", 6)
