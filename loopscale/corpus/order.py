"""Which sample comes when: a pure function of (samples, seed, shuffle block) and of how many samples came before.

Within an epoch, runs of neighbouring samples (a 16th of a shuffle block) are put in a keyed order, and then all
samples within each shuffle block of the result are. So a reader moves through at most some 16 places of the corpus at
a time, which suits shards, and a corpus smaller than a block is shuffled as a whole. Every epoch has its own keys.

Keys are Philox words of the counter (index, epoch, block), not numpy's own permutations, whose streams may change from
one version to another.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from loopscale.randomness import philox, stream_key

_RUNS_PER_BLOCK = 16
_KEPT_BLOCKS = 2
"""Blocks kept in order, 8 bytes a sample: that being read, and the one before for readers near its edge."""


class Order:
    """``order[consumed]``: the sample id that is read when ``consumed`` samples came before, over all epochs."""

    def __init__(self, samples: int, seed: int, shuffle_block: int):
        if samples < 1 or shuffle_block < 1:
            raise ValueError(f"samples ({samples}) and shuffle_block ({shuffle_block}) must be at least 1")
        self.samples, self.seed, self.shuffle_block = samples, seed, shuffle_block
        self._run = max(1, shuffle_block // _RUNS_PER_BLOCK)
        self._blocks: OrderedDict[tuple[int, int], NDArray[np.int64]] = OrderedDict()
        self._runs: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def __getitem__(self, consumed: int) -> int:
        epoch, position = divmod(consumed, self.samples)
        block, place = divmod(position, self.shuffle_block)
        return int(self._block(epoch, block)[place])

    def _block(self, epoch: int, block: int) -> NDArray[np.int64]:
        """Sample ids of one shuffle block, in order."""
        key = (epoch, block)
        if key not in self._blocks:
            begin = block * self.shuffle_block
            positions = np.arange(begin, min(begin + self.shuffle_block, self.samples))
            self._blocks[key] = self._run_order(epoch, positions)[_permutation(len(positions), self.seed, epoch, block + 1)]
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[key]

    def _run_order(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at ``positions`` after the runs of the epoch have been put in their order."""
        if self._runs is None or self._runs[0] != epoch:
            runs = _permutation(-(-self.samples // self._run), self.seed, epoch, 0)
            lengths = np.minimum(self._run, self.samples - runs * self._run)
            self._runs = (epoch, runs * self._run, np.cumsum(lengths) - lengths)
        _, first, begin = self._runs
        run = np.searchsorted(begin, positions, side="right") - 1
        samples: NDArray[np.int64] = first[run] + positions - begin[run]
        return samples


def _permutation(count: int, seed: int, epoch: int, block: int) -> NDArray[np.int64]:
    """A keyed permutation of range(count)."""
    index = np.arange(count, dtype=np.int64)
    words = philox((index & 0xFFFFFFFF, index >> 32, np.int64(epoch), np.int64(block)), stream_key(seed, "sample order"))
    order: NDArray[np.int64] = np.lexsort((words[1], words[0]))
    return order
