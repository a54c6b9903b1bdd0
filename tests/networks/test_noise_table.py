"""Noise of the source as a table: the same numbers at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testkit.models.tiny_model import TINY
from token2wav.assembly import load_network
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.networks import noise as module
from token2wav.networks.noise import NoiseTable, SourceNoise
from token2wav.networks.source import HarmonicSource

SAMPLES = 480  # per frame
BLOCK = 50
ROUNDING = 1e-6  # a product of 9 numbers below 1 with weights about 1, summed in another order


@pytest.fixture(scope="module")
def source() -> HarmonicSource:
    return load_network(TINY, CosyVoice3Config.read(TINY), "vocoder").m_source


@pytest.fixture
def raw(source: HarmonicSource) -> SourceNoise:
    """Noise of the source before it is merged."""
    return SourceNoise(source.config.nb_harmonics + 1, skip=5)


def check(table: NoiseTable, raw: SourceNoise, starts: list[int], width: int = 60) -> None:
    rows = table.find(np.array(starts), width)
    assert rows.shape == (len(starts), width)
    for noise, start in zip(table.rows[torch.from_numpy(rows)], starts, strict=True):
        before, first = max(0, -start), max(0, start)
        expected = table._source.merged(raw.window(first * SAMPLES, (start + width) * SAMPLES))
        assert torch.allclose(noise[before:].flatten(), expected, atol=ROUNDING, rtol=0)


def test_stretches_equal_the_window(source: HarmonicSource, raw: SourceNoise) -> None:
    table = NoiseTable(raw, source)
    check(table, raw, [0, 120, 49, 3, -3])
    check(table, raw, [BLOCK * 299 - 1])  # past the public buffer, and past the table's first size
    check(table, raw, [10, BLOCK * 1000])


def test_prepared_noise_is_not_drawn_again(
    source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = NoiseTable(raw, source)
    table.prepare(4)
    monkeypatch.setattr(table, "_draw", pytest.fail)
    check(table, raw, [0, 4 * BLOCK - 60])


def test_memory_is_bounded(
    source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BLOCKS", 2)
    monkeypatch.setattr(module, "_MOST_BLOCKS", 4)
    table = NoiseTable(raw, source)
    for block in range(9):
        check(table, raw, [block * BLOCK, 0], BLOCK)  # the first is in use all the time, and stays
        assert len(table.rows) <= 4 * BLOCK
    check(table, raw, [5 * BLOCK], BLOCK)
    assert len(table.rows) == 4 * BLOCK
    # one batch that needs more than that
    check(table, raw, [block * BLOCK for block in range(6)], BLOCK)
    assert len(table.rows) == 8 * BLOCK
