"""BigVGAN in pieces, and how it comes from a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.vocoder import PieceShape, StreamingVocoderEngine
from token2wav.families.bigvgan.config import check_mel, read_bigvgan
from token2wav.families.bigvgan.weights import load_bigvgan
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.configs import MelSettings
from token2wav.networks.streaming import Piece


class BigVGANEngine(StreamingVocoderEngine):
    """Streaming engine of BigVGAN.

    Args:
        bigvgan: on the device that is to be used.
        exported: runs `BigVGAN.forward` inside of streams on another backend than torch.
        shapes, graphs: see `StreamingVocoderEngine`.
    """

    def __init__(
        self,
        bigvgan: BigVGAN,
        exported: Callable[[torch.Tensor, Piece], torch.Tensor] | None = None,
        *,
        shapes: Sequence[PieceShape] = (),
        graphs: GraphPool | None = None,
    ) -> None:
        self._bigvgan, self._exported = bigvgan, exported
        super().__init__(bigvgan, shapes=shapes, graphs=graphs)

    def _run(self, mel: torch.Tensor, noise: torch.Tensor, piece: Piece) -> torch.Tensor:
        exported = None if piece.first or piece.beyond else self._exported
        return (exported or self._bigvgan)(mel, piece)[:, 0]

    @torch.inference_mode()
    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        return self._bigvgan(mel[None].to(self._bigvgan.device))[0, 0]


def bigvgan_engine(folder: Path, mel: MelSettings, device: torch.device) -> BigVGANEngine:
    """The engine of a BigVGAN folder, see `load_bigvgan`.

    Args:
        folder: with configuration and weights.
        mel: what the flow makes.
        device: that is to be used.

    Raises:
        ConfigError: the configuration cannot be used, or is for other mels than the flow's.
        CheckpointError: the weights cannot be used.
    """
    check_mel(read_bigvgan(folder), mel)  # before any weights are read
    return BigVGANEngine(load_bigvgan(folder).to(device))
