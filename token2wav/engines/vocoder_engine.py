"""The incremental vocoder engine: every chunk costs only itself."""

from __future__ import annotations

from token2wav.engines.incremental_vocoder import IncrementalVocoderEngine
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.incremental import IncrementalHiFT, VocoderNetwork, VocoderState
from token2wav.vocoder.noise import SourceNoise
from token2wav.vocoder.source import Phase


class CachedVocoderEngine(IncrementalVocoderEngine[VocoderState]):
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
        super().__init__(IncrementalHiFT(hift, noise, phase, network), hift.window.device)
