"""Streaming vocoder: audio that is sent early, an empty end, and sizes of batches on a GPU.

`tests/families` tests streams against the whole.
"""

from __future__ import annotations

import torch

from testkit.models.tiny_model import TINY
from tests.stages.rig import AUDIO, Parts
from token2wav import StreamConfig
from token2wav.execution.buckets import PaddedSize
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.stages.piece_sizes import kernel_sizes
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage


def test_early_audio_goes_on_with_the_last_frame(parts: Parts) -> None:
    """A mel that stays as its last frame is what early audio expects, so the audio is exact."""
    start = torch.randn(80, 50, generator=torch.Generator().manual_seed(0))
    mel = torch.cat((start, start[:, -1:].expand(-1, 30)), dim=1)
    engine = WaveformStage(parts.hift, parts.source_noise, lookahead_frames=1)
    [audio] = engine.advance([(engine.open(), FrameChunk(start, last=False))])
    assert len(audio) == 480 * 49
    assert float((audio - engine.whole(mel)[: len(audio)]).abs().max()) <= AUDIO


def test_an_end_without_any_frame(parts: Parts) -> None:
    engine = WaveformStage(parts.hift, parts.source_noise)
    [audio] = engine.advance([(engine.open(), FrameChunk(torch.zeros(80, 0), last=True))])
    assert len(audio) == 0


def test_few_sizes_cover_all_chunks() -> None:
    config = CosyVoice3Config.read(TINY)
    sizes = kernel_sizes(5, config, config.hops(StreamConfig()))
    assert len(sizes) == 13
    assert {size.length for size in sizes} == {105, 205}
    assert {size.rows for size in sizes if size.length == 205} == {1, 2, 4, 8, 16, 32}
    assert max(size.rows for size in sizes) == 64, "first chunks of 64 streams are one batch"
    # The lean setting has hops of 50 tokens.
    assert max(kernel_sizes(5, config, (25, 50))) == PaddedSize(105, 64)
    # The first piece of a stream must be longer than the frames that are held back.
    [size] = kernel_sizes(21, config, (5, 5), 1)
    assert size.length == 22 + 21
