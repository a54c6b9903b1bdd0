"""HiFT in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.vocoder import PieceShape, StreamingVocoderEngine
from token2wav.networks.hift import Decode, HiFT
from token2wav.networks.noise_table import NoiseTable
from token2wav.networks.source_noise import SourceNoise
from token2wav.networks.streaming import Piece


class HiFTEngine(StreamingVocoderEngine):
    """Streaming engine of HiFT.

    Args:
        hift: on the device that is to be used.
        noise: of the harmonic source.
        decode: runs `HiFT.decode` inside of streams on another backend than torch.
        shapes, graphs, hold_frames: see `StreamingVocoderEngine`.
    """

    def __init__(
        self,
        hift: HiFT,
        noise: SourceNoise,
        decode: Decode | None = None,
        *,
        shapes: Sequence[PieceShape] = (),
        graphs: GraphPool | None = None,
        hold_frames: int = 0,
    ) -> None:
        self._hift, self._source_noise, self._decode = hift, noise, decode
        table = NoiseTable(noise, hift.m_source)
        super().__init__(hift, table, shapes=shapes, graphs=graphs, hold_frames=hold_frames)

    def _run(self, mel: torch.Tensor, noise: torch.Tensor, piece: Piece) -> torch.Tensor:
        decode = None if piece.first or piece.beyond else self._decode
        return self._hift(mel, noise, piece, decode=decode)

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        return self._hift.vocode(mel[None].to(self._hift.device), self._source_noise)[0]
