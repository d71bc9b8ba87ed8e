"""The digest of a tensor's elements: the same however the tensor is cut, another for any change."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopscale.diagnostics import digest
from loopscale.diagnostics.digest import element_digest

WRAP = 2**64


def whole(tensor: Tensor) -> int:
    return int(element_digest(tensor, tensor.shape, (0,) * tensor.dim()))


@st.composite
def tiled(draw) -> tuple[Tensor, list[tuple[slice, ...]]]:
    """A tensor and boxes that cover it once: cut at random, then each of the boxes again, along either axis."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 1000))))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(*box[axis]))
        boxes += [tuple((*box[:axis], part, *box[axis + 1 :])) for part in ((box[axis][0], at), (at, box[axis][1]))]
    return tensor, [tuple(slice(*part) for part in box) for box in draw(st.permutations(boxes))]


@given(tiled(), st.integers(1, 20))
def test_any_tiling_in_any_order_gives_the_same_sum(case, chunk):
    tensor, boxes = case
    expected = whole(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "CHUNK", chunk)  # boxes are cut again inside
        pieces = [element_digest(tensor[box], tensor.shape, [part.start for part in box]) for box in boxes]
    assert int(torch.stack(pieces).sum()) == expected


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**20))
def test_the_formula_in_whole_numbers(height, width, column):
    """As Python computes it, without wrapping, for a box in a wide tensor."""
    tensor, shape = torch.randn(height, width), (height + 3, column + width)
    expected = row = 0
    for row in range(height):
        for place in range(width):
            (bits,) = struct.unpack("<i", struct.pack("<f", tensor[row, place].item()))
            expected += bits * odd(2 * (column + place)) * odd(2 * (row + 3) + 1)
    assert int(element_digest(tensor, shape, (3, column))) == signed(expected)
    (bits,) = struct.unpack("<i", struct.pack("<f", tensor[row, 0].item()))
    assert int(element_digest(tensor[row, :1], (column + 1,), (column,))) == signed(bits * odd(2 * column))


def odd(index: int) -> int:
    mixed = signed(index * 0x9E3779B97F4A7C15)
    mixed = signed((mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> 29)) | 1


def signed(value: int) -> int:
    value %= WRAP
    return value - WRAP if value >= WRAP // 2 else value


@given(st.integers(0, 99), st.integers(0, 31))
def test_any_flipped_bit_changes_it(place, bit):
    tensor = torch.randn(100)
    before = whole(tensor)
    flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    tensor.view(torch.int32)[place] ^= flip
    assert whole(tensor) != before


@given(st.integers(0, 999), st.integers(0, 999))
def test_a_swapped_pair_changes_it(one, other):
    tensor = torch.randn(1000)
    swapped = tensor.clone()
    swapped[[one, other]] = tensor[[other, one]]
    assert (whole(swapped) == whole(tensor)) == (tensor[one] == tensor[other])


@pytest.mark.parametrize("rows", [slice(5, 6), slice(5, 8)])
def test_errors_of_a_pattern_do_not_cancel(rows):
    """+1, -2, +1 in the last bits of neighbours would cancel under multipliers in an arithmetic series."""
    tensor = torch.ones(64, 64)
    changed = tensor.clone()
    changed.view(torch.int32)[rows, 7:10] += torch.tensor([1, -2, 1], dtype=torch.int32)
    assert whole(changed) != whole(tensor)
    changed.view(torch.int32)[20:23, 7:10] -= torch.tensor([1, -2, 1], dtype=torch.int32)
    assert whole(changed) != whole(tensor)


@given(st.integers(2, 9))
def test_what_is_turned_or_has_another_shape_shows(width):
    tensor = torch.randn(width, width)
    assert whole(tensor.t().contiguous()) != whole(tensor)
    assert whole(tensor.flatten()) != whole(tensor)
    assert whole(tensor.flip(0)) != whole(tensor) != whole(tensor.flip(1))


def test_zeros_of_either_sign_and_nans_are_told_apart_and_nothing_is_nothing():
    assert whole(torch.zeros(3)) == 0 != whole(-torch.zeros(3))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert whole(nans) != whole(nans.flip(0))
    assert int(element_digest(torch.empty(0, 4), (8, 4), (3, 0))) == 0
