"""How the core is cut: against trying everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loopscale.parallel.ring.slices import balanced_slices


def every_cut(layers: int, stages: int):
    """All ways to give ``layers`` to stages of which only the first may go empty."""
    if stages == 1:
        yield (layers,)
        return
    for last in range(1, layers + 1):
        yield from ((*rest, last) for rest in every_cut(layers - last, stages - 1) if 0 not in rest[1:])


@given(data=st.data(), stages=st.integers(1, 4), layer=st.floats(0.1, 10), home=st.floats(0, 50))
def test_no_cut_has_a_lighter_heaviest_stage(data, stages, layer, home):
    layers = data.draw(st.integers(max(1, stages - 1), 8))
    slices = balanced_slices(layers, stages, layer, home)
    assert len(slices) == stages
    assert sum(slices) == layers
    assert 0 not in slices[1:]

    def heaviest(cut):
        return max(own * layer + home * (s == 0) for s, own in enumerate(cut))

    best = min(heaviest(cut) for cut in every_cut(layers, stages) if len(cut) == stages)
    assert heaviest(slices) <= best * (1 + 1e-12)


def test_a_heavy_home_holds_no_layers():
    assert balanced_slices(2, 2, 1.0, 10.0) == (0, 2)
    assert balanced_slices(8, 3, 1.0, 2.0) == (2, 3, 3)
    assert balanced_slices(12, 4, 1.0, 0.0) == (3, 3, 3, 3)
