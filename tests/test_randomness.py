"""Counter-based random numbers: known answers, and values that do not depend on how they are drawn."""

from __future__ import annotations

import math

import pytest
import torch

from loopscale.randomness import normals, philox, stream_key, truncated_normals, uniform, uniforms

KNOWN_ANSWERS = [  # counter, key, result: Random123's kat_vectors for philox4x32-10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KEY = stream_key(1, "state")
DRAWS = {
    "uniforms": uniforms,
    "normals": normals,
    "truncated_normals": lambda *arguments: truncated_normals(*arguments, 2.0),
}


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox(words(counter), words(key)) == words(expected)
    tensors = tuple(torch.tensor([word]) for word in words(counter))
    assert tuple(word.item() for word in philox(tensors, words(key))) == words(expected)


def test_integers_and_tensors_agree() -> None:
    counters = torch.randint(2**32, (4, 500), generator=torch.Generator().manual_seed(0))
    drawn = torch.stack(philox(tuple(counters), KEY)).T
    assert [tuple(row) for row in drawn.tolist()] == [philox(tuple(column), KEY) for column in counters.T.tolist()]


def test_keys_and_counters_are_told_apart() -> None:
    assert len({stream_key(seed, purpose) for seed in (1, 2, 12) for purpose in ("depth", "state", "2depth")}) == 9
    keyed = {
        uniform(seed, purpose, *counter) for seed in (1, 2) for purpose in ("a", "b") for counter in ((0, 1), (1, 0), (1, 1))
    }
    assert len(keyed) == 12
    assert uniform(1, "a") == uniform(1, "a", 0, 0, 0, 0)


@pytest.mark.parametrize("name", DRAWS)
def test_any_slice_is_drawn_as_in_the_whole(name: str) -> None:
    draw = DRAWS[name]
    positions, samples = torch.arange(6)[:, None], torch.arange(100, 105)
    whole = draw(KEY, positions, samples, 3, 10)
    assert whole.shape == (6, 5, 10) and whole.dtype == torch.float32
    assert torch.equal(draw(KEY, positions[2:5], samples[1:3], 3, 10), whole[2:5, 1:3])
    for width in (1, 2, 3, 7):
        assert torch.equal(draw(KEY, positions, samples, 3, width), whole[..., :width])
    assert whole.unique().numel() == whole.numel()
    assert not (draw(KEY, positions, samples, 4, 10) == whole).any()


def test_uniforms_are_the_words_of_their_counters() -> None:
    drawn = uniforms(KEY, torch.tensor([7]), torch.tensor([11]), 3, 8)[0]
    expected = [word for block in (0, 1) for word in philox((block, 7, 11, 3), KEY)]
    torch.testing.assert_close(drawn.double(), (torch.tensor(expected, dtype=torch.float64) + 0.5) / 2**32, rtol=0, atol=2**-24)


def test_uniform_floats_are_uniform() -> None:
    drawn = torch.tensor([uniform(5, "depth", i) for i in range(4000)], dtype=torch.float64)
    assert drawn.min() > 0 and drawn.max() < 1
    gap = (drawn.sort().values - (torch.arange(4000) + 0.5) / 4000).abs().max()
    assert gap < 1.95 / math.sqrt(4000)  # Kolmogorov-Smirnov, 0.1%


def test_moments() -> None:
    positions, samples = torch.arange(64)[:, None], torch.arange(32)
    count, error = 64 * 32 * 128, 5 / math.sqrt(64 * 32 * 128)

    flat = uniforms(KEY, positions, samples, 0, 128).double()
    assert flat.min() > 0 and flat.max() <= 1
    assert abs(flat.mean() - 1 / 2) < error * math.sqrt(1 / 12)
    assert abs(flat.var() - 1 / 12) < error * math.sqrt(1 / 180)

    bell = normals(KEY, positions, samples, 0, 128).double()
    assert abs(bell.mean()) < error
    assert abs(bell.var() - 1) < error * math.sqrt(2)
    assert abs(bell.pow(4).mean() - 3) < error * math.sqrt(96)
    for axis in range(3):  # neighbours in position, sample and channel are independent
        ahead, behind = bell.narrow(axis, 1, bell.shape[axis] - 1), bell.narrow(axis, 0, bell.shape[axis] - 1)
        assert abs((ahead * behind).sum()) < 5 * math.sqrt(count)

    cut = 2.0
    cropped = truncated_normals(KEY, positions, samples, 0, 128, cut).double()
    density, inside = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi), math.erf(cut / math.sqrt(2))
    assert cropped.abs().max() <= cut * (1 + 1e-6)
    assert abs(cropped.mean()) < error
    assert abs(cropped.var() - (1 - 2 * cut * density / inside)) < error * math.sqrt(2)
