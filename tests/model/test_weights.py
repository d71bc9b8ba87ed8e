"""The table of weights: names, shapes, fused holders, first values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopscale.config.tree import ModelConfig
from loopscale.model.flops import count, training_flops
from loopscale.model.weights import holders, initial, padded_rows
from loopscale.parallel.ring.plan import Work
from tests.holding import elements, join, spans, split


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_boxes_of_all_ranks_and_intervals_tile_the_weights(size, groups, per_group, cuts):
    """Every element of every weight is in exactly one box, and lies where the box says; an interval cuts a matrix into three
    boxes at most."""
    kv = groups * size
    model = ModelConfig(
        vocab_size=101, hidden_size=8 * size, heads=kv * per_group, kv_heads=kv, head_dim=2, ffn_size=6 * size,
        value_embeddings=True, qk_bias=True, tied_head=False,
    )  # fmt: skip
    for holder in holders(model, 16):
        whole = {w.name: torch.arange(1, 1 + math.prod(w.shape)).view(w.shape) for w in holder.weights}
        ranks = size if holder.tensor_axis is not None else 1
        shares = [join(holder, whole, rank, ranks) for rank in range(ranks)]
        assert len({share.shape for share in shares}) == 1
        assert sum(int((share > 0).sum()) for share in shares) == sum(w.numel() for w in whole.values())
        times = {w.name: torch.zeros(w.shape, dtype=torch.int64) for w in holder.weights}
        for rank, share in enumerate(shares):
            ends = sorted({0, share.numel(), *(int(cut * share.numel()) for cut in cuts)})
            for first, end in itertools.pairwise(ends):
                boxes = list(holder.boxes(rank, ranks, first, end))
                for box in boxes:
                    assert first <= box.start and box.start + elements(box) <= end
                    held = share.view(-1)[box.start : box.start + elements(box)]
                    assert torch.equal(whole[box.weight.name][spans(box)].flatten(), held)
                    times[box.weight.name][spans(box)] += 1
                assert holder.fused != "none" or len(boxes) <= 3
        assert all((count == 1).all() for count in times.values())


def test_rows_are_padded_alike_for_every_usual_number_of_ranks():
    assert [padded_rows(101, size) for size in (1, 2, 4, 8)] == [128] * 4
    assert padded_rows(8000, 1) == 8000
    assert padded_rows(64, 5) == 320


def test_qkv_rows_are_grouped_as_megatron_has_them():
    model = ModelConfig(vocab_size=11, hidden_size=1, heads=4, kv_heads=2, head_dim=1, ffn_size=2)
    qkv = next(h for h in holders(model, 4) if h.fused == "qkv")
    held = torch.tensor([[0.0], [1.0], [10.0], [20.0], [2.0], [3.0], [11.0], [21.0]])  # q0 q1 k0 v0 | q2 q3 k1 v1
    parts = [p.flatten().tolist() for p in split(qkv, [held]).values()]
    assert parts == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_the_published_sizes_of_paper_a_and_b():
    """43.9M and 128.8M at V = 20,000; 0.106B / 0.304B, 0.425B / 0.819B and 1.699B / 2.488B."""
    for width, heads, layers, published in ((512, 8, 8, 43.9e6), (768, 12, 12, 128.8e6)):
        model = ModelConfig(
            vocab_size=20_000, hidden_size=width, heads=heads, ffn_size=4 * width, prelude_layers=0, core_layers=layers,
            coda_layers=0, inject="none", state_init="embedding", positions="learned", tied_head=True,
        )  # fmt: skip
        assert count(model, 256).total == pytest.approx(published, rel=2e-3)
    for width, heads, ffn, inner, total in (
        (1536, 24, 4352, 0.106e9, 0.304e9),
        (3072, 48, 8704, 0.425e9, 0.819e9),
        (6144, 96, 17408, 1.699e9, 2.488e9),
    ):
        model = ModelConfig(vocab_size=64_256, hidden_size=width, heads=heads, kv_heads=heads // 4, ffn_size=ffn)
        counts = count(model, 8192)
        assert counts.total == pytest.approx(total, rel=2e-3)
        assert counts.total - counts.embedding == pytest.approx(inner, rel=5e-3)


def test_operations_of_a_tiny_model_by_hand():
    """d 4, one head, f 8, V 10: a layer has 4·4·4 + 3·4·8 = 160, ortho's map 16, the head 40."""
    model = ModelConfig(vocab_size=10, hidden_size=4, heads=1, ffn_size=8, prelude_layers=1, core_layers=2, coda_layers=1)
    counts = count(model, 4)
    assert training_flops(counts, Work(1, 1, (1,))) == 6 * (160 + 16) + 6 * 320 + 6 * (160 + 40)
    assert training_flops(counts, Work(4, 4, (4,))) == 6 * (160 + 16) + 4 * 6 * 320 + 6 * (160 + 40)
    assert training_flops(counts, Work(4, 1, (4,))) == 6 * (160 + 16) + (6 + 3 * 2) * 320 + 6 * (160 + 40)
    assert training_flops(counts, Work(4, 4, (1, 2, 3, 4))) == 6 * (160 + 16) + 4 * 6 * 320 + 4 * 6 * (160 + 40)


def test_first_values_have_the_published_spread_and_depend_on_name_and_seed():
    model = ModelConfig(vocab_size=512, hidden_size=256, heads=4, ffn_size=512)
    table = {w.name: w for h in holders(model, 8) for w in h.weights}
    q, other = initial(table["core.0.q"], model, 1), initial(table["core.1.q"], model, 1)
    assert q.std().item() == pytest.approx(0.02, rel=0.02)
    embedding = initial(table["embedding.tokens"], model, 1)
    assert embedding.std().item() == pytest.approx(256**-0.5 * 0.9866, rel=0.02)  # a normal cut at 3σ has std 0.9866
    assert embedding.abs().max().item() <= 3 * 256**-0.5 * 1.0001
    assert not torch.equal(q, other)
    assert not torch.equal(q, initial(table["core.0.q"], model, 2))
    assert torch.equal(q, initial(table["core.0.q"], model, 1))
    dt = initial(table["inject.dt_bias"], model, 1)
    assert torch.exp(-torch.nn.functional.softplus(dt)).mean().item() == pytest.approx(1 / math.sqrt(5), rel=1e-6)


def test_pytorch_scheme_is_that_of_the_library():
    model = ModelConfig(vocab_size=2000, hidden_size=64, heads=4, ffn_size=256, init_scheme="pytorch")
    table = {w.name: w for h in holders(model, 8) for w in h.weights}
    assert initial(table["embedding.tokens"], model, 1).std().item() == pytest.approx(1.0, rel=0.02)
    gate, reference = initial(table["core.0.gate"], model, 1), torch.nn.Linear(64, 256, bias=False).weight
    assert gate.abs().max().item() == pytest.approx(reference.abs().max().item(), rel=0.01)
    assert gate.std().item() == pytest.approx(reference.std().item(), rel=0.03)
