"""BigVGAN as a vocoder stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from token2wav.execution.recompute import RecomputeVocoder
from token2wav.execution.runner import GraphPool
from token2wav.execution.vocoder import PieceShape, StreamingVocoder
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.networks.streaming import Piece


def streaming_bigvgan(
    bigvgan: BigVGAN,
    exported: Callable[[torch.Tensor, Piece], torch.Tensor] | None = None,
    *,
    shapes: Sequence[PieceShape] = (),
    graphs: GraphPool | None = None,
    hold_frames: int = 0,
) -> StreamingVocoder:
    """Makes the stage in pieces.

    Args:
        bigvgan: on the device that is to be used.
        exported: runs `BigVGAN.forward` inside of streams on another backend than torch.
        shapes, graphs, hold_frames: see `StreamingVocoder`.
    """

    def run(mel: torch.Tensor, noise: torch.Tensor, piece: Piece) -> torch.Tensor:
        inside = exported is not None and not piece.first and not piece.beyond
        return (exported if inside and exported else bigvgan)(mel, piece)[:, 0]

    def whole(mel: torch.Tensor) -> torch.Tensor:
        return bigvgan(mel[None])[0, 0]

    return StreamingVocoder(bigvgan, run, whole, shapes=shapes, graphs=graphs, hold_frames=hold_frames)


def recomputed_bigvgan(bigvgan: BigVGAN) -> RecomputeVocoder:
    """Makes the stage that recomputes everything."""
    return RecomputeVocoder(bigvgan, lambda mel: bigvgan(mel[None])[0, 0])
