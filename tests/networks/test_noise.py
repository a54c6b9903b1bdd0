"""Noise: equal to a stock deployment, shared by threads, endless, in bounded memory, as a table."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testkit.models.golden import GoldenSet, golden_sets
from testkit.models.tiny_model import DATA, FULL_SIZE, TINY
from token2wav.assembly import load_network
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.noise import draws_before_source
from token2wav.networks import noise as module
from token2wav.networks.noise import (
    _BLOCK_SAMPLES,
    PAGE_FRAMES,
    FlowNoise,
    NoiseTable,
    SourceNoise,
)
from token2wav.networks.source import HarmonicSource

BANDS, HARMONICS = 80, 9
BLOCK = _BLOCK_SAMPLES


def public(name: str) -> dict[str, Any]:
    return json.loads((DATA / "public_noise.json").read_text())[name]


@cache
def stock_source() -> SourceNoise:
    config = CosyVoice3Config.read(TINY)
    return SourceNoise(HARMONICS, draws_before_source(config.flow, config.vocoder))


@cache
def first_samples() -> torch.Tensor:
    """The first blocks of the tiny model's source noise, drawn in one go as a stock model does."""
    config = CosyVoice3Config.read(TINY)
    generator = torch.Generator().manual_seed(0)
    torch.rand(draws_before_source(config.flow, config.vocoder), generator=generator)
    return torch.rand(4 * BLOCK, HARMONICS, generator=generator)


# Digests of the public buffers.


def test_the_flow_noise_is_the_public_one() -> None:
    noise = FlowNoise(BANDS).window(0, PAGE_FRAMES)
    assert [1, *noise.shape] == public("rand_noise")["shape"]
    assert (
        hashlib.sha256(noise.contiguous().numpy().tobytes()).hexdigest()
        == public("rand_noise")["sha256"]
    )


def test_the_source_noise_of_the_full_size_is_the_public_one() -> None:
    config = CosyVoice3Config.read(FULL_SIZE)
    noise = SourceNoise(HARMONICS, draws_before_source(config.flow, config.vocoder))
    digest, step = hashlib.sha256(), 10 * BLOCK
    samples = public("sine_waves")["shape"][1]
    for start in range(0, samples, step):
        digest.update(noise.window(start, min(start + step, samples)).numpy().tobytes())
    assert digest.hexdigest() == public("sine_waves")["sha256"]


@pytest.mark.parametrize("golden", golden_sets(), ids=lambda golden: golden.folder.name)
def test_the_drawn_noise_is_that_of_the_golden_tensors(golden: GoldenSet, tmp_path: Path) -> None:
    config = CosyVoice3Config.read(golden.model_folder(tmp_path))
    samples = golden.report["audio_samples_total"]["full"]
    noise = SourceNoise(HARMONICS, draws_before_source(config.flow, config.vocoder))
    # torch draws multiples of 2**-24, whose digest was taken of integers of 3 bytes, low byte first
    integers = (noise.window(0, samples).numpy() * 2**24).astype("<u4")
    three_bytes = integers.view(np.uint8).reshape(samples, HARMONICS, 4)[..., :3]
    digests = golden.report["noise_sha256"]
    assert hashlib.sha256(three_bytes.tobytes()).hexdigest() == digests["sinegen.sine_waves_u24"]
    frames = 2 * (golden.report["config"]["prompt"] + golden.report["config"]["tokens"])
    flow_noise = FlowNoise(BANDS).window(0, frames).contiguous().numpy()
    assert hashlib.sha256(flow_noise.tobytes()).hexdigest() == digests["cfm.rand_noise"]


def test_source_noise_is_safe_to_share_between_threads() -> None:
    config = CosyVoice3Config.read(TINY)
    noise = SourceNoise(HARMONICS, draws_before_source(config.flow, config.vocoder))
    wrong: list[int] = []

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for start in torch.randint(3 * BLOCK, (10,), generator=generator).tolist():
            if not torch.equal(
                noise.window(start, start + 100), first_samples()[start : start + 100]
            ):
                wrong.append(start)

    first_samples()
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Past 300 seconds.


def test_flow_noise_goes_on_past_its_public_end() -> None:
    end = PAGE_FRAMES
    across = FlowNoise(BANDS).window(end - 5, 3 * end + 5)
    assert across.isfinite().all()
    assert torch.equal(across[:, 5:10], FlowNoise(BANDS).window(end, end + 5))
    pages = [FlowNoise(BANDS).window(page * end, (page + 1) * end) for page in range(3)]
    for page, noise in enumerate(pages):
        assert abs(float(noise.mean())) < 0.01
        assert abs(float(noise.std()) - 1) < 0.01
        for other in pages[:page]:
            correlation = torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]
            assert abs(float(correlation)) < 0.01


def test_source_noise_goes_on_past_its_public_end() -> None:
    end = public("sine_waves")["shape"][1]
    noise = stock_source()
    past = noise.window(end, end + 2 * BLOCK)
    assert past.isfinite().all()
    assert float(past.min()) >= 0
    assert float(past.max()) < 1
    assert abs(float(past.mean()) - 0.5) < 0.01
    assert not torch.equal(past[:BLOCK], past[BLOCK:])
    assert not torch.equal(past[:BLOCK], noise.window(0, BLOCK))
    assert torch.equal(noise.window(end, end + 2 * BLOCK), past)


def test_memory_of_source_noise_is_bounded() -> None:
    noise = SourceNoise(HARMONICS, 1)
    for block in range(30):
        noise.window(block * BLOCK, block * BLOCK + 1)
    states = noise._known
    noise.window(0, 3 * BLOCK)  # blocks with known states add no states
    assert noise._known == states
    assert noise._states.numel() < 301 * 6000


# A table of the merged noise of a source.

FRAME, ROWS = 480, 50  # samples of a frame, and frames of a block


@pytest.fixture(scope="module")
def source() -> HarmonicSource:
    return load_network(TINY, CosyVoice3Config.read(TINY), "vocoder").m_source


@pytest.fixture
def raw(source: HarmonicSource) -> SourceNoise:
    """Noise of the source before it is merged."""
    return SourceNoise(source.config.nb_harmonics + 1, skip=5)


def assert_equal(table: NoiseTable, raw: SourceNoise, starts: list[int], width: int = 60) -> None:
    rows = table.find(np.array(starts), width)
    assert rows.shape == (len(starts), width)
    for noise, start in zip(table.rows[torch.from_numpy(rows)], starts, strict=True):
        before, first = max(0, -start), max(0, start)
        expected = table._source.merged(raw.window(first * FRAME, (start + width) * FRAME))
        assert torch.allclose(noise[before:].flatten(), expected, atol=1e-6, rtol=0)


def test_stretches_of_a_table_equal_the_window(source: HarmonicSource, raw: SourceNoise) -> None:
    table = NoiseTable(raw, source)
    assert_equal(table, raw, [0, 120, 49, 3, -3])
    assert_equal(
        table, raw, [ROWS * 299 - 1]
    )  # past the public buffer, and past the table's first size
    assert_equal(table, raw, [10, ROWS * 1000])


def test_prepared_noise_is_not_drawn_again(
    source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = NoiseTable(raw, source)
    table.prepare(4)
    monkeypatch.setattr(table, "_draw", pytest.fail)
    assert_equal(table, raw, [0, 4 * ROWS - 60])


def test_memory_of_a_table_is_bounded(
    source: HarmonicSource, raw: SourceNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BLOCKS", 2)
    monkeypatch.setattr(module, "_MOST_BLOCKS", 4)
    table = NoiseTable(raw, source)
    for block in range(9):
        assert_equal(
            table, raw, [block * ROWS, 0], ROWS
        )  # the first is in use all the time, and stays
        assert len(table.rows) <= 4 * ROWS
    assert_equal(table, raw, [5 * ROWS], ROWS)
    assert len(table.rows) == 4 * ROWS
    # one batch that needs more than that
    assert_equal(table, raw, [block * ROWS for block in range(6)], ROWS)
    assert len(table.rows) == 8 * ROWS
