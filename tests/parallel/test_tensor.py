"""Tensor parallelism: padded vocabularies, the loss over shares of the head, and what one rank reads for all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopscale.config.tree import ParallelConfig
from loopscale.model.sharing import Sharing
from loopscale.model.weights import padded_rows
from loopscale.objective.cross_entropy import linear_cross_entropy
from loopscale.parallel.mesh import Mesh, on_reader, sum_over_tensor_ranks
from tests.holding import gather_shares
from tests.parallel.test_layouts import Case, compare, configuration, trace

pytestmark = pytest.mark.ranks

ROWS, WIDTH, VOCABULARY = 37, 8, 101


def head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, a head, targets of which some are not scored, and weights of rows."""
    source = torch.Generator().manual_seed(3)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=source)
    targets[::5] = -100
    targets[1:4] = torch.tensor([0, 63, 100])  # the ends of shares
    return (
        torch.randn(ROWS, WIDTH, generator=source),
        torch.randn(VOCABULARY, WIDTH, generator=source),
        targets,
        torch.rand(ROWS, generator=source),
    )


def loss_of_shares(mesh: Mesh, weighted: bool) -> tuple[torch.Tensor, ...]:
    """Sum, losses, and gradients by states, head and row weights, from each rank's rows of the padded head."""
    states, weight, targets, row_weights = head()
    size = mesh.tensor_size
    rows = padded_rows(VOCABULARY, size) // size
    padded = F.pad(weight, (0, 0, 0, rows * size - VOCABULARY), value=9.0)
    own = padded[mesh.tensor_rank * rows : (mesh.tensor_rank + 1) * rows].clone().requires_grad_()
    states.requires_grad_()
    row_weights.requires_grad_(weighted)
    share = Sharing(mesh.tensor_rank, size, False).vocabulary(rows, VOCABULARY)
    total, losses = linear_cross_entropy(states, own, targets, 10, row_weights if weighted else None, share)
    (3 * total).backward()
    d_weight = torch.cat(gather_shares(own.grad))
    assert not d_weight[VOCABULARY:].any(), "padding gets no gradient"
    by_rows = row_weights.grad if weighted else torch.zeros(())
    return total.detach(), losses, sum_over_tensor_ranks(states.grad), d_weight[:VOCABULARY], by_rows


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_over_shares_of_the_head_are_those_of_the_whole(ranks, size, weighted):
    states, weight, targets, row_weights = (t.double() if t.is_floating_point() else t for t in head())
    for t in (states, weight, row_weights):
        t.requires_grad_()
    losses = F.cross_entropy(states @ weight.t(), targets, reduction="none")
    total = (losses * row_weights).sum() if weighted else losses.sum()
    (3 * total).backward()
    by_rows = row_weights.grad if weighted else torch.zeros(())
    expected = (total, losses, states.grad, weight.grad, by_rows)
    for found in ranks.run(loss_of_shares, size, weighted, parallel=ParallelConfig(tensor=size)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs.detach().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_vocabulary_of_101_gives_the_same_losses_however_it_is_padded(mesh, ranks, tensor):
    """Four key/value heads, so that four ranks can share them; weights come back without padding."""
    config = configuration(Case("TP2", "huginn", "drawn", "all", "terminal", True))
    config = config.model_copy(update={"parallel": ParallelConfig(tensor=tensor, sequence_parallel=True)})
    alone = trace(mesh, config.model_copy(update={"parallel": ParallelConfig()}), 2)
    found = ranks.run(trace, tensor, config, 2, parallel=config.parallel)[0]
    assert max(difference for _, difference in compare(found, alone)) <= 1e-5
    assert found.weights["embedding.tokens"].shape == (VOCABULARY, 32)


def read(mesh: Mesh) -> tuple[int, int, int]:
    calls = []

    def action() -> int:
        calls.append(1)
        return 100 + mesh.data_rank

    return on_reader(mesh, action), mesh.data_rank, len(calls)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=2, pipeline=2),
        ParallelConfig(tensor=2),
        ParallelConfig(pipeline=2),
        ParallelConfig(pipeline=2, order="tp-pp-dp"),
        ParallelConfig(),
    ],
    ids=["TP2xPP2", "TP2xDP2", "PP2xDP2", "stages-are-neighbours", "DP4"],
)
def test_one_rank_of_a_replica_reads_and_its_ranks_get_the_same(ranks, parallel):
    found = ranks.run(read, 4, parallel=parallel)
    assert all(value == 100 + data_rank for value, data_rank, _ in found)
    replicas = 4 // (parallel.tensor * parallel.pipeline)
    assert sum(calls for *_, calls in found) == replicas == len({value for value, *_ in found})
