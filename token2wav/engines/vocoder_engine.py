"""The incremental vocoder engine: every chunk costs only itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.engines.base import MelChunk
from token2wav.engines.handles import HandleTable
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.incremental import IncrementalHiFT, VocoderNetwork, VocoderState
from token2wav.vocoder.noise import SourceNoise
from token2wav.vocoder.source import Phase


class CachedVocoderEngine:
    """Incremental HiFT. The result is that of `RecomputeVocoderEngine` up to float rounding.

    Args:
        hift: on the device that is to be used.
        noise: of the harmonic source.
        phase: rounding of the source's phase, see `StreamConfig`.
        network: runs `HiFT.network` on another engine than torch.
    """

    def __init__(
        self, hift: HiFT, noise: SourceNoise, phase: Phase = "exact", network: VocoderNetwork | None = None
    ) -> None:
        self._hift = IncrementalHiFT(hift, noise, phase, network)
        self._device = hift.window.device
        self._streams: HandleTable[VocoderState] = HandleTable()

    def open(self) -> int:
        return self._streams.add(self._hift.start())

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        return self._hift.advance_batch(
            [(self._streams[handle], chunk.mel.to(self._device), chunk.last) for handle, chunk in batch]
        )

    def close(self, handle: int) -> None:
        self._streams.remove(handle)

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """See `VocoderEngine.whole`."""
        return self._hift.whole(mel.to(self._device))

    @property
    def open_streams(self) -> int:
        return len(self._streams)
