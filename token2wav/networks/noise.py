"""Noise of the flow and of the harmonic source: each number is a function of its place in the
utterance alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.networks.source import HarmonicSource

PUBLIC_SEED = 0
PAGE_FRAMES = 15000  # the public buffer: 300 s at 50 frames per second


@lru_cache(maxsize=4)
def _page(index: int, bands: int, device: torch.device) -> torch.Tensor:
    """(bands, PAGE_FRAMES). Page 0 is the public buffer; later pages have seeds of their own."""
    # of the CPU: others draw other numbers
    generator = torch.Generator().manual_seed(PUBLIC_SEED + index)
    return torch.randn(1, bands, PAGE_FRAMES, generator=generator)[0].to(device)


def _stretches(start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """Blocks of so many numbers each that those from `start` to `stop` lie in, and which of theirs
    these are.
    """
    while start < stop:
        block, offset = divmod(start, size)
        yield block, slice(offset, min(size, offset + stop - start))
        start += size - offset


class FlowNoise:
    """Gaussian noise of every frame, counted from the start of the prompt.

    A stock CosyVoice3 seeds all generators with 0 and draws 300 s; the same numbers are drawn here
    when first needed. Past their end the noise goes on with other seeds instead of failing.

    A table (bands, T) replaces the first T frames, for models that were built with other noise.
    """

    def __init__(
        self, bands: int, table: torch.Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._bands = bands
        self._device = torch.device(device)
        self._table = torch.empty(bands, 0, device=device) if table is None else table.to(device)

    def to(self, device: torch.device) -> FlowNoise:
        """The same noise, kept where it is needed."""
        return FlowNoise(self._bands, self._table, device)

    def window(self, start: int, stop: int) -> torch.Tensor:
        """(bands, stop - start) float32."""
        drawn = _stretches(max(start, self._table.shape[1]), stop, PAGE_FRAMES)
        pages = [_page(page, self._bands, self._device)[:, frames] for page, frames in drawn]
        return torch.cat((self._table[:, start:stop], *pages), dim=1)


_BLOCK_SAMPLES = 24000  # drawn at once: 0.9 MB with 9 harmonics
_PUBLIC_BLOCKS = 300
_BLOCKS_KEPT = 8


class SourceNoise:
    """Uniform [0, 1) numbers for every sample and harmonic, counted from the first sample of the
    utterance.

    The public buffer holds 300 s, 260 MB. Its generator is sequential, so a block of it can be
    drawn alone once the generator's state at its start is known: 5 kB a second are kept instead,
    and the last few blocks. Past 300 s every block has a seed of its own.

    Args:
        harmonics: sines per sample, the fundamental included.
        skip: numbers to draw before the first sample (`draws_before_source` of CosyVoice3).
        table: (N, harmonics) that replaces the first N samples, for models that were built with
            other noise; float, or (N, harmonics, 3) uint8 for 24-bit integers, low byte first, in
            units of 2**-24.
    """

    def __init__(self, harmonics: int, skip: int, table: torch.Tensor | None = None) -> None:
        self._harmonics = harmonics
        self._skip = skip
        self._table = table if table is not None else torch.empty(0, harmonics)
        # One piece of memory: 300 small ones, made as a stream goes on, leave a heap that is all
        # holes (110 MiB).
        state = torch.Generator().get_state()
        self._states = state.new_empty(_PUBLIC_BLOCKS + 1, len(state))
        self._known = 0
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def window(self, start: int, stop: int) -> torch.Tensor:
        """(stop - start, harmonics) float32 on the CPU."""
        drawn = _stretches(max(start, len(self._table)), stop, _BLOCK_SAMPLES)
        return torch.cat(
            (
                _unpacked(self._table[start:stop]),
                *(self._block(block)[part] for block, part in drawn),
            )
        )

    def _block(self, index: int) -> torch.Tensor:
        with self._lock:
            if index in self._blocks:
                self._blocks.move_to_end(index)
                return self._blocks[index]
            self._blocks[index] = block = (
                self._public(index) if index < _PUBLIC_BLOCKS else self._seeded(index)
            )
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
            return block

    def _public(self, index: int) -> torch.Tensor:
        generator = torch.Generator()
        if not self._known:
            generator.manual_seed(PUBLIC_SEED)
            torch.rand(self._skip, generator=generator)
            self._keep(0, generator)
        nearest = min(index, self._known - 1)
        # torch 2.13 reads a view from its storage's start
        generator.set_state(self._states[nearest].clone())
        for at in range(nearest, index + 1):
            block = torch.rand(_BLOCK_SAMPLES, self._harmonics, generator=generator)
            self._keep(at + 1, generator)
        return block

    def _keep(self, index: int, generator: torch.Generator) -> None:
        """Notes the generator's state at the start of a block."""
        if index == self._known:
            self._states[index] = generator.get_state()
            self._known += 1

    def _seeded(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(PUBLIC_SEED + index)
        return torch.rand(_BLOCK_SAMPLES, self._harmonics, generator=generator)


class NormalNoise(SourceNoise):
    """Gaussian numbers, for sources whose published noise is other for every utterance, so that any
    will do.
    """

    def __init__(self, harmonics: int, table: torch.Tensor | None = None) -> None:
        super().__init__(harmonics, 0, table)

    def _public(self, index: int) -> torch.Tensor:
        return self._seeded(index)

    def _seeded(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(PUBLIC_SEED + index)
        return torch.randn(_BLOCK_SAMPLES, self._harmonics, generator=generator)


def _unpacked(table: torch.Tensor) -> torch.Tensor:
    if table.dtype != torch.uint8:
        return table
    weights = torch.tensor([1, 1 << 8, 1 << 16])
    return (table.long() * weights).sum(-1).float() / (1 << 24)


_BLOCK_FRAMES = 50
_FIRST_BLOCKS = 64
_MOST_BLOCKS = 300  # five minutes, 29 MB; more only if one batch needs more


class NoiseTable:
    """Merged noise by mel frames. Blocks are drawn when a stream first gets that far, and serve all
    that follow.

    The numbers come from torch's generator on the CPU, which no device can repeat; so they are
    drawn there, in order, and copied once. Which rows a chunk needs is told in numbers of rows: the
    device looks them up by itself.

    Attributes:
        late: frames by which the source's F0 is late in pieces, and its noise with it.
        rows: (blocks * 50, samples_per_frame) float32. It may be another tensor after `find`.
        lock: to be held from `find` until its rows have been read, where there are several threads.
    """

    def __init__(self, noise: SourceNoise, source: HarmonicSource) -> None:
        self._noise = noise
        self._source = source
        self.late = source.input_delay
        self._samples = source.config.samples_per_frame
        self.rows = source.l_linear.weight.new_zeros(_FIRST_BLOCKS * _BLOCK_FRAMES, self._samples)
        # of every block of an utterance: in the table, or nowhere
        self._place = np.full(_FIRST_BLOCKS, -1)
        self._holds = np.full(_FIRST_BLOCKS, -1)  # of every place: the block that is there
        # of every place: the call that last asked for it
        self._used = np.zeros(_FIRST_BLOCKS, np.int64)
        self._calls = 0
        self.lock = threading.Lock()

    def prepare(self, blocks: int) -> None:
        """Draws the first blocks, so that nobody waits for them."""
        self.find(np.zeros(1, np.int64), blocks * _BLOCK_FRAMES)

    @torch.inference_mode()
    def find(self, starts: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Finds the rows (B, width) where the noise of some stretches stands; until the next call
        it stays there.

        `starts` (B,) are their first frames from the start of the utterance on; any row stands for
        one before it.
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
        self.rows[place * _BLOCK_FRAMES : (place + 1) * _BLOCK_FRAMES] = merged.unflatten(
            0, (-1, self._samples)
        )
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
