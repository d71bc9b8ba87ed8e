from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loopscale.corpus.order import Order

sizes = st.integers(1, 400)
blocks = st.integers(1, 500)
seeds = st.integers(0, 2**40)


@given(sizes, blocks, seeds, st.integers(0, 3))
def test_each_epoch_is_a_permutation(samples: int, block: int, seed: int, epoch: int) -> None:
    order = Order(samples, seed, block)
    assert sorted(order[epoch * samples + i] for i in range(samples)) == list(range(samples))


@given(sizes, blocks, seeds, st.data())
def test_what_is_read_does_not_depend_on_what_was_read_before(samples: int, block: int, seed: int, data: st.DataObject) -> None:
    used = Order(samples, seed, block)
    for consumed in data.draw(st.lists(st.integers(0, 4 * samples), max_size=12)):
        assert used[consumed] == Order(samples, seed, block)[consumed]


def test_epochs_and_seeds_differ() -> None:
    order = Order(200, 1, 64)
    epochs = [[order[e * 200 + i] for i in range(200)] for e in range(3)]
    other = [Order(200, 2, 64)[i] for i in range(200)]
    assert len({tuple(e) for e in [*epochs, other]}) == 4


def test_a_corpus_within_one_block_is_shuffled_as_a_whole() -> None:
    """Every sample is as likely at every place: the mean place over seeds is the middle."""
    places = np.array([[Order(10, seed, 1000)[i] for i in range(10)] for seed in range(400)])
    assert abs(places.mean(0) - 4.5).max() < 0.6
    assert abs((places == np.arange(10)).mean(0) - 0.1).max() < 0.06


def test_a_block_stays_in_few_places() -> None:
    order = Order(100_000, 1, 1600)
    runs = {order[i] // 100 for i in range(1600)}
    assert len(runs) == 16


def test_the_order_is_the_one_of_this_version() -> None:
    """A change here would silently change every run's data order."""
    order = Order(1000, 7, 128)
    assert [order[i] for i in (0, 1, 2, 500, 999, 1000, 1001)] == [391, 179, 898, 100, 291, 319, 885]
