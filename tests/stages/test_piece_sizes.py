"""Sizes of batches of pieces: few of them, and one for every chunk."""

from __future__ import annotations

from testkit.models.tiny_model import TINY
from token2wav import StreamConfig
from token2wav.execution.buckets import PaddedSize
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.stages.piece_sizes import kernel_sizes


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
