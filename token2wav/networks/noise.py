"""Flow noise and source noise. Each number is a function of its position in the utterance alone."""

from __future__ import annotations

import threading
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
    """Draws page `index`, (bands, PAGE_FRAMES)."""
    # the generator of the CPU, because other devices draw other numbers
    generator = torch.Generator().manual_seed(PUBLIC_SEED + index)
    return torch.randn(1, bands, PAGE_FRAMES, generator=generator)[0].to(device)


def _stretches(start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """Yields the blocks of `size` numbers with the positions from `start` to `stop`, each with a
    slice of the block.
    """
    while start < stop:
        block, offset = divmod(start, size)
        yield block, slice(offset, min(size, offset + stop - start))
        start += size - offset


class FlowNoise:
    """Gaussian noise of every frame, counted from the start of the prompt.

    The public code of CosyVoice3 seeds all generators with 0 and draws 300 s. The same numbers are
    drawn here on first use. After 300 s the noise continues with other seeds; the public code
    fails.

    Args:
        table: (bands, T) numbers that replace the first T frames, for models that were built with
            other noise.
    """

    def __init__(
        self, bands: int, table: torch.Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._bands = bands
        self._device = torch.device(device)
        self._table = torch.empty(bands, 0, device=device) if table is None else table.to(device)

    def to(self, device: torch.device) -> FlowNoise:
        return FlowNoise(self._bands, self._table, device)

    def window(self, start: int, stop: int) -> torch.Tensor:
        """Returns the noise (bands, stop - start) float32 of frames."""
        return torch.cat(self.pieces(start, stop), dim=1)

    def pieces(self, start: int, stop: int) -> list[torch.Tensor]:
        """Returns the noise of frames as views of tables (bands, ...), without a launch."""
        stretches = _stretches(max(start, self._table.shape[1]), stop, PAGE_FRAMES)
        pages = [_page(page, self._bands, self._device)[:, frames] for page, frames in stretches]
        return [self._table[:, start:stop], *pages]


_BLOCK_SAMPLES = 24000  # samples of a block: 0.9 MB with 9 harmonics
_PUBLIC_BLOCKS = 300


class SourceNoise:
    """Uniform [0, 1) noise for every sample and harmonic, counted from the first sample of the
    utterance.

    The public buffer holds 300 s, which is 260 MB. Its generator is sequential. So a block can be
    drawn alone once the generator state at its start is known. These states are stored instead, 5
    kB for each second. After 300 s every block has a seed of its own. `NoiseTable` keeps blocks.

    Args:
        harmonics: sines per sample, with the fundamental.
        skip: draws before the first sample (`draws_before_source` of CosyVoice3).
        table: (N, harmonics) numbers that replace the first N samples.
    """

    def __init__(self, harmonics: int, skip: int, table: torch.Tensor | None = None) -> None:
        self._harmonics = harmonics
        self._skip = skip
        self._table = table if table is not None else torch.empty(0, harmonics)
        # One allocation. 300 small ones, made while streams run, would fragment the heap (110 MiB).
        state = torch.Generator().get_state()
        self._states = state.new_empty(_PUBLIC_BLOCKS + 1, len(state))
        self._known = 0
        self._lock = threading.Lock()

    def window(self, start: int, stop: int) -> torch.Tensor:
        """Returns the noise (stop - start, harmonics) float32 on the CPU."""
        stretches = _stretches(max(start, len(self._table)), stop, _BLOCK_SAMPLES)
        return torch.cat(
            (
                self._table[start:stop],
                *(self._block(block)[part] for block, part in stretches),
            )
        )

    def _block(self, index: int) -> torch.Tensor:
        if index >= _PUBLIC_BLOCKS:
            return self._seeded(index)
        with self._lock:
            return self._public(index)

    def _public(self, index: int) -> torch.Tensor:
        generator = torch.Generator()
        if not self._known:
            generator.manual_seed(PUBLIC_SEED)
            torch.rand(self._skip, generator=generator)
            self._keep(0, generator)
        nearest = min(index, self._known - 1)
        # a copy, because torch 2.13 reads a view from the start of its storage
        generator.set_state(self._states[nearest].clone())
        for block_index in range(nearest, index + 1):
            block = torch.rand(_BLOCK_SAMPLES, self._harmonics, generator=generator)
            self._keep(block_index + 1, generator)
        return block

    def _keep(self, index: int, generator: torch.Generator) -> None:
        """Stores the generator state at the start of a block."""
        if index == self._known:
            self._states[index] = generator.get_state()
            self._known += 1

    def _seeded(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(PUBLIC_SEED + index)
        return torch.rand(_BLOCK_SAMPLES, self._harmonics, generator=generator)


class NormalNoise(SourceNoise):
    """Gaussian noise, for sources whose public code draws new noise for every utterance, so that
    any noise fits.
    """

    def __init__(self, harmonics: int, table: torch.Tensor | None = None) -> None:
        super().__init__(harmonics, 0, table)

    def _public(self, index: int) -> torch.Tensor:
        return self._seeded(index)

    def _seeded(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(PUBLIC_SEED + index)
        return torch.randn(_BLOCK_SAMPLES, self._harmonics, generator=generator)


_BLOCK_FRAMES = 50
_FIRST_BLOCKS = 64
_MOST_BLOCKS = 300  # size of the table: five minutes, 29 MB; it grows for a larger batch


class NoiseTable:
    """Table of merged noise by mel frame. A block is drawn when the first stream reaches it, and
    serves all later streams.

    Attributes:
        late: delay of F0 of the source in a stream, in frames. The noise has the same delay.
        rows: (blocks * 50, samples_per_frame) float32. `find` may replace the tensor.
        lock: lock for several threads: hold it from `find` until the rows have been read.
    """

    def __init__(self, noise: SourceNoise, source: HarmonicSource) -> None:
        self._noise = noise
        self._source = source
        self.late = source.input.delay
        self._samples = source.config.samples_per_frame
        self.rows = source.l_linear.weight.new_zeros(_FIRST_BLOCKS * _BLOCK_FRAMES, self._samples)
        # for every block of an utterance: its slot in the table, or -1
        self._slots = np.full(_FIRST_BLOCKS, -1)
        self._blocks = np.full(_FIRST_BLOCKS, -1)  # for every slot: its block, or -1
        # for every slot: the last call of `find` that asked for its block
        self._last_calls = np.zeros(_FIRST_BLOCKS, np.int64)
        self._calls = 0
        self.lock = threading.Lock()

    def prepare(self, blocks: int) -> None:
        """Draws the first blocks at load, so that no stream waits for them."""
        self.find(np.zeros(1, np.int64), blocks * _BLOCK_FRAMES)

    @torch.inference_mode()
    def find(self, starts: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Returns the rows (B, width) of the table that hold the noise of frames. They stay valid
        until the next call.

        Args:
            starts: (B,) first frames, counted from the start of the utterance. Any row serves for
                frames before the start.
        """
        self._calls += 1
        frames = np.maximum(starts[:, None] + np.arange(width), 0)
        blocks = frames // _BLOCK_FRAMES
        distinct = np.unique(blocks)
        if distinct[-1] >= len(self._slots):
            more = np.full(max(int(distinct[-1]) + 1, 2 * len(self._slots)) - len(self._slots), -1)
            self._slots = np.concatenate((self._slots, more))
        slots = self._slots[distinct]
        self._last_calls[slots[slots >= 0]] = self._calls
        for block in distinct[slots < 0]:
            self._draw(int(block))
        return self._slots[blocks] * _BLOCK_FRAMES + frames % _BLOCK_FRAMES

    def _draw(self, block: int) -> None:
        slot = self._free_slot()
        samples = _BLOCK_FRAMES * self._samples
        numbers = self._noise.window(block * samples, (block + 1) * samples)
        merged = self._source.merged(numbers.to(self.rows.device))
        self.rows[slot * _BLOCK_FRAMES : (slot + 1) * _BLOCK_FRAMES] = merged.unflatten(
            0, (-1, self._samples)
        )
        self._slots[block], self._blocks[slot], self._last_calls[slot] = slot, block, self._calls

    def _free_slot(self) -> int:
        """Returns an empty slot, or the least recently used one; never evicts a block of this
        call.
        """
        if len(empty := np.flatnonzero(self._blocks < 0)):
            return int(empty[0])
        oldest = int(self._last_calls.argmin())
        if len(self._blocks) >= _MOST_BLOCKS and self._last_calls[oldest] < self._calls:
            self._slots[self._blocks[oldest]] = -1
            return oldest
        count = len(self._blocks)
        more = min(count, _MOST_BLOCKS - count) if count < _MOST_BLOCKS else count
        self.rows = torch.cat((self.rows, self.rows.new_zeros(more * _BLOCK_FRAMES, self._samples)))
        self._blocks = np.concatenate((self._blocks, np.full(more, -1)))
        self._last_calls = np.concatenate((self._last_calls, np.zeros(more, np.int64)))
        return count
