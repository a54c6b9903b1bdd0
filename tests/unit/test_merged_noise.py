"""The source's noise after the layer that merges harmonics: the same numbers, whatever window asks for them."""

from __future__ import annotations

import threading

import pytest
import torch

from token2wav.vocoder import noise as noise_module
from token2wav.vocoder.noise import _BLOCK_SAMPLES, MergedNoise, SourceNoise
from token2wav.vocoder.source import HarmonicSource

BLOCK = _BLOCK_SAMPLES
ROUNDING = 1e-6  # a product of 9 numbers below 1 with weights about 1, summed in another order


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, BLOCK), (BLOCK - 3, BLOCK + 3), (100, 2 * BLOCK + 1), (7, 7)])
def test_a_window_is_the_merged_window(source: HarmonicSource, raw: SourceNoise, start: int, stop: int) -> None:
    window = MergedNoise(raw, source).window(start, stop)
    assert window.shape == (stop - start,)
    assert torch.allclose(window, source.merged(raw.window(start, stop)), atol=ROUNDING, rtol=0)


def test_parts_are_those_of_the_whole(source: HarmonicSource, raw: SourceNoise) -> None:
    merged = MergedNoise(raw, source)
    parts = [merged.window(start, start + 9600) for start in range(0, 5 * 9600, 9600)]
    assert torch.equal(torch.cat(parts), merged.window(0, 5 * 9600))


def test_threads_get_the_same(source: HarmonicSource, raw: SourceNoise) -> None:
    merged, expected = MergedNoise(raw, source), MergedNoise(raw, source).window(0, 3 * BLOCK)
    got: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: got.append(merged.window(0, 3 * BLOCK))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(torch.equal(each, expected) for each in got)


def test_memory_is_bounded(source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_PUBLIC_BLOCKS", 4)
    merged = MergedNoise(raw, source)
    first = merged.window(0, BLOCK).clone()
    for block in range(1, 8):
        merged.window(block * BLOCK, block * BLOCK + 1)
    assert len(merged._blocks) == 4
    assert torch.equal(merged.window(0, BLOCK), first)
