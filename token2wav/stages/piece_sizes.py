"""Batch sizes that a vocoder on kernels is prepared for."""

from __future__ import annotations

from token2wav.config.model_config import ModelConfig
from token2wav.execution.buckets import PaddedSize

MOST_STREAMS = 64  # streams of the largest batch; larger batches are split
# Frames of all pieces of the largest batch, without look-ahead: 64 streams with 100 frames, or 32
# with 200. At the public size the tensors of a batch take 0.7 MB for each frame with look-ahead.
# This is 4.7 GB for each of the two batches; all graphs share the memory of the largest one.
_MOST_FRAMES = 6400


def kernel_sizes(
    lookahead_frames: int,
    config: ModelConfig,
    hops: tuple[int, int],  # first and longest, in tokens
    most_streams: int = MOST_STREAMS,
) -> list[PaddedSize]:
    """Lists sizes, in frames, for first chunks and for the longest chunks, each for 1, 2, 4 ...
    streams.

    A first chunk has up to twice the frames of a hop, because it also fills the last block of the
    prompt. A last chunk is longer by the frames that the vocoder holds back. A chunk needs no size
    of its own, because instances of a kernel return immediately beyond its rows.
    """
    first, longest = (config.token_mel_ratio * hop for hop in hops)
    # The first piece of a stream must be longer than the frames that are held back.
    longest = max(longest, lookahead_frames + 1)
    first = max(2 * first, lookahead_frames + 1)
    return [
        PaddedSize(frames + lookahead_frames, 1 << doublings)
        for frames in sorted({min(first, longest), longest})
        for doublings in range(min(most_streams, max(1, _MOST_FRAMES // frames)).bit_length())
    ]
