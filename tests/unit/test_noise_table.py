"""The source's noise as a table: the same numbers, wherever in it they stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from token2wav.vocoder import noise_table as module
from token2wav.vocoder.noise import MergedNoise, SourceNoise
from token2wav.vocoder.noise_table import NoiseTable
from token2wav.vocoder.source import HarmonicSource

SAMPLES = 480  # per frame
BLOCK = 50


def found(table: NoiseTable, starts: list[int], counts: list[int], width: int) -> list[torch.Tensor]:
    rows = table.find(np.array(starts), np.array(counts), width)
    assert rows.shape == (len(starts), width)
    noise = table.rows[torch.from_numpy(rows)]
    return [noise[index, :count].flatten() for index, count in enumerate(counts)]


def check(table: NoiseTable, merged: MergedNoise, starts: list[int], counts: list[int], width: int = 60) -> None:
    for noise, start, count in zip(found(table, starts, counts, width), starts, counts, strict=True):
        assert torch.equal(noise, merged.window(start * SAMPLES, (start + count) * SAMPLES))


def test_stretches_are_those_of_the_window(source: HarmonicSource, raw: SourceNoise) -> None:
    table, merged = NoiseTable(raw, source), MergedNoise(raw, source)
    check(table, merged, [0, 120, 49, 3, 7], [50, 60, 2, 1, 0])
    check(table, merged, [BLOCK * 299 - 1], [60])  # past the public buffer, and past the table's first size
    check(table, merged, [10, BLOCK * 1000], [60, 60])


def test_what_is_prepared_is_there(source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch) -> None:
    table, merged = NoiseTable(raw, source), MergedNoise(raw, source)
    table.prepare(4)
    monkeypatch.setattr(table, "_draw", pytest.fail)
    check(table, merged, [0, 4 * BLOCK - 60], [60, 60])


def test_memory_is_bounded(source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BLOCKS", 2)
    monkeypatch.setattr(module, "_MOST_BLOCKS", 4)
    table, merged = NoiseTable(raw, source), MergedNoise(raw, source)
    for block in range(9):
        check(table, merged, [block * BLOCK, 0], [50, 50])  # the first is in use all the time, and stays
        assert len(table.rows) <= 4 * BLOCK
    check(table, merged, [5 * BLOCK], [50])
    assert len(table.rows) == 4 * BLOCK
    check(table, merged, [block * BLOCK for block in range(6)], [50] * 6)  # one batch that needs more than that
    assert len(table.rows) == 8 * BLOCK
