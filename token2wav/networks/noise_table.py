"""The source's noise as a table in the device's memory, so that no chunk brings numbers from the host."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.networks.source import HarmonicSource
from token2wav.networks.source_noise import SourceNoise

_BLOCK_FRAMES = 50
_FIRST_BLOCKS = 64
_MOST_BLOCKS = 300  # five minutes, 29 MB; more only if one batch needs more


class NoiseTable:
    """Merged noise by mel frames. Blocks are drawn when a stream first gets that far, and serve all that follow.

    The numbers come from torch's generator on the CPU, which no device can repeat; so they are drawn there, in order,
    and copied once. Which rows a chunk needs is told in numbers of rows: the device looks them up by itself.

    Args:
        noise: of every harmonic.
        source: that merges them; on the device where the table is to be.

    Attributes:
        late: frames by which the source's F0 is late in pieces, and its noise with it.
        rows: (blocks * 50, samples_per_frame) float32. It may be another tensor after `find`.
        lock: to be held from `find` until its rows have been read, where there are several threads.
    """

    def __init__(self, noise: SourceNoise, source: HarmonicSource) -> None:
        self._noise = noise
        self._source = source
        self.late = source.delay
        self._samples = source.config.samples_per_frame
        self.rows = source.l_linear.weight.new_zeros(_FIRST_BLOCKS * _BLOCK_FRAMES, self._samples)
        self._place = np.full(_FIRST_BLOCKS, -1)  # of every block of an utterance: in the table, or nowhere
        self._holds = np.full(_FIRST_BLOCKS, -1)  # of every place: the block that is there
        self._used = np.zeros(_FIRST_BLOCKS, np.int64)  # of every place: the call that last asked for it
        self._calls = 0
        self.lock = threading.Lock()

    def prepare(self, blocks: int) -> None:
        """Draws the first blocks, so that nobody waits for them."""
        self.find(np.zeros(1, np.int64), blocks * _BLOCK_FRAMES)

    @torch.inference_mode()
    def find(self, starts: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Finds where the noise of some stretches stands; until the next call it stays there.

        Args:
            starts: (B,) first frames, counted from the start of the utterance; any row stands for one before it.
            width: frames of each.

        Returns:
            (B, width) rows of the table.
        """
        self._calls += 1
        frames = np.maximum(starts[:, None] + np.arange(width), 0)
        blocks = frames // _BLOCK_FRAMES
        needed = np.unique(blocks)
        if needed[-1] >= len(self._place):
            more = np.full(max(int(needed[-1]) + 1, 2 * len(self._place)) - len(self._place), -1)
            self._place = np.concatenate((self._place, more))
        there = self._place[needed]
        self._used[there[there >= 0]] = self._calls
        for block in needed[there < 0]:
            self._draw(int(block))
        return self._place[blocks] * _BLOCK_FRAMES + frames % _BLOCK_FRAMES

    def _draw(self, block: int) -> None:
        place = self._free_place()
        samples = _BLOCK_FRAMES * self._samples
        drawn = self._noise.window(block * samples, (block + 1) * samples)
        merged = self._source.merged(drawn.to(self.rows.device))
        self.rows[place * _BLOCK_FRAMES : (place + 1) * _BLOCK_FRAMES] = merged.unflatten(0, (-1, self._samples))
        self._place[block], self._holds[place], self._used[place] = place, block, self._calls

    def _free_place(self) -> int:
        """A place that holds nothing, or else nothing of this call."""
        if len(empty := np.flatnonzero(self._holds < 0)):
            return int(empty[0])
        oldest = int(self._used.argmin())
        if len(self._holds) >= _MOST_BLOCKS and self._used[oldest] < self._calls:
            self._place[self._holds[oldest]] = -1
            return oldest
        count = len(self._holds)
        more = min(count, _MOST_BLOCKS - count) if count < _MOST_BLOCKS else count
        self.rows = torch.cat((self.rows, self.rows.new_zeros(more * _BLOCK_FRAMES, self._samples)))
        self._holds = np.concatenate((self._holds, np.full(more, -1)))
        self._used = np.concatenate((self._used, np.zeros(more, np.int64)))
        return count
