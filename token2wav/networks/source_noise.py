"""The harmonic source's noise: uniform numbers, a function of the absolute sample position and of nothing else."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from token2wav.networks.noise import PUBLIC_SEED

_BLOCK_SAMPLES = 24000  # drawn at once: 0.9 MB with 9 harmonics
_PUBLIC_BLOCKS = 300
_BLOCKS_KEPT = 8


class SourceNoise:
    """Uniform [0, 1) numbers for every sample and harmonic, counted from the first sample of the utterance.

    The public buffer holds 300 s, 260 MB. Its generator is sequential, so a block of it can be drawn alone once the
    generator's state at its start is known: 5 kB a second are kept instead, and the last few blocks. Past 300 s every
    block has a seed of its own.

    Args:
        harmonics: sines per sample, the fundamental included.
        skip: numbers to draw before the first sample (`draws_before_source` of CosyVoice3).
        table: (N, harmonics) that replaces the first N samples, for models that were built with other noise; float,
            or (N, harmonics, 3) uint8 for 24-bit integers, low byte first, in units of 2**-24.
    """

    def __init__(self, harmonics: int, skip: int, table: torch.Tensor | None = None) -> None:
        self._harmonics = harmonics
        self._skip = skip
        self._table = table if table is not None else torch.empty(0, harmonics)
        # One piece of memory: 300 small ones, made as a stream goes on, leave a heap that is all holes (110 MiB).
        state = torch.Generator().get_state()
        self._states = state.new_empty(_PUBLIC_BLOCKS + 1, len(state))
        self._known = 0
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def window(self, start: int, stop: int) -> torch.Tensor:
        """(stop - start, harmonics) float32 on the CPU."""
        given = self._table.shape[0]
        parts = [_unpacked(self._table[start : min(stop, given)])] if start < given else []
        at = max(start, given)
        while at < stop:
            index, offset = divmod(at, _BLOCK_SAMPLES)
            take = min(stop - at, _BLOCK_SAMPLES - offset)
            parts.append(self._block(index)[offset : offset + take])
            at += take
        return torch.cat(parts) if parts else torch.empty(0, self._harmonics)

    def _block(self, index: int) -> torch.Tensor:
        with self._lock:
            if index in self._blocks:
                self._blocks.move_to_end(index)
                return self._blocks[index]
            self._blocks[index] = block = self._public(index) if index < _PUBLIC_BLOCKS else self._seeded(index)
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
        generator.set_state(self._states[nearest].clone())  # torch 2.13 reads a view from its storage's start
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
    """Gaussian numbers, for sources whose published noise is other for every utterance, so that any will do.

    Args:
        harmonics: sines per sample, the fundamental included.
        table: (N, harmonics) that replaces the first N samples.
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
