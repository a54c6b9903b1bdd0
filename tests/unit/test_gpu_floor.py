"""The floor of `make gpu-check`: against numbers worked out by hand, the modules' own weights, and torch's counter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.floor import (
    Floor,
    Rates,
    Work,
    as_row,
    attended_pairs,
    estimator_weights,
    flow_work,
    vocoder_work,
)
from tests.support.golden import ROOT, TINY
from token2wav.flow.cache import CacheLayout
from token2wav.flow.flow import Flow
from token2wav.hift_config import HiFTConfig
from token2wav.model_config import ModelConfig
from token2wav.vocoder.convolutions import UpConv
from token2wav.vocoder.hift import HiFT

FULL = ModelConfig.read(ROOT / "tests" / "data" / "full_size")
LAYERS = 22 * (4 * 1024 * 1024 + 2 * 1024 * 2048) + 1024 * 80
INPUT = (80 + 80 + 80 + 80) * 1024 + 2 * 1024 * 64 * 31
H200 = Rates(bandwidth=4.8e12, half=800e12, single=60e12, double=60e12)


def full_flow(streams: int, frames: int, past: int) -> Work:
    return flow_work(FULL.flow, CacheLayout.of(FULL.flow, "float16"), "float16", streams, frames, past)


def test_weights_of_the_full_size() -> None:
    assert estimator_weights(FULL.flow) == (LAYERS, INPUT)
    with torch.device("meta"):
        estimator = Flow(FULL.flow).estimator
    estimator.drop_time_weights()
    assert sum(weight.numel() for weight in estimator.parameters() if weight.dim() > 1) == LAYERS + INPUT


def test_blocks_see_none_after_them() -> None:
    assert attended_pairs(50, 0, 50) == 50 * 50
    assert attended_pairs(100, 50, 50) == 50 * 100 + 50 * 150
    assert attended_pairs(60, 0, 50) == 50 * 50 + 10 * 60


def test_one_chunk_of_the_full_size() -> None:
    work = full_flow(streams=1, frames=50, past=0)
    look_ahead = 80 * 1024 * (4 + 3)
    assert work.half == 2 * 10 * (2 * 50 * LAYERS + 2 * 22 * 1024 * 2 * 50 * 50)
    assert work.single == 2 * (10 * 2 * 50 * INPUT + 25 * look_ahead)
    assert work.weight_bytes == 10 * (2 * LAYERS + 4 * INPUT) + 4 * look_ahead
    assert work.cache_bytes == 2 * 22 * 1024 * 2 * 10 * 2 * 50  # 90.1 MB
    assert work.half + work.single == pytest.approx(0.38e12, rel=0.02)
    assert work.weight_bytes / 10 / 4.8e12 == pytest.approx(0.08e-3, rel=0.02)


def test_a_batch_shares_its_weights_and_nothing_else() -> None:
    one, many = full_flow(1, 50, 500), full_flow(64, 50, 500)
    assert many.weight_bytes == one.weight_bytes
    assert many.cache_bytes == 64 * one.cache_bytes == 64 * 11 * 90_112_000
    assert (many.half, many.single) == (64 * one.half, 64 * one.single)


def test_float32_layers_count_as_such() -> None:
    layout = CacheLayout.of(FULL.flow, "float32")
    work, half = flow_work(FULL.flow, layout, "float32", 1, 50, 0), full_flow(1, 50, 0)
    assert (work.half, work.single) == (0, half.half + half.single)
    assert work.cache_bytes == 2 * half.cache_bytes


def test_the_longer_of_reading_and_computing() -> None:
    floor = Floor.of(Work(weight_bytes=4.8e9, cache_bytes=4.8e9, half=800e9, single=30e9, double=60e9), H200)
    assert floor.memory_ms == pytest.approx(2.0)
    assert floor.arithmetic_ms == pytest.approx(1.0 + 0.5 + 1.0)
    assert floor.ms == floor.arithmetic_ms
    assert Floor.of(Work(weight_bytes=4.8e9), H200).ms == pytest.approx(1.0)


def test_a_chunk_costs_some_two_milliseconds() -> None:
    assert isinstance(FULL.vocoder, HiFTConfig)
    row = as_row(full_flow(1, 50, 100), vocoder_work(FULL.vocoder, 1, 50), H200)
    assert row["flow_memory_ms"] == pytest.approx(0.87, abs=0.03)
    assert 1.0 < row["floor_ms"] < 2.0
    assert row["floor_ms"] == pytest.approx(row["flow_memory_ms"] + row["vocoder_arithmetic_ms"], abs=1e-3)


def test_the_flow_against_torchs_counter() -> None:
    config = ModelConfig.read(TINY).flow
    estimator, frames = Flow(config).eval().requires_grad_(False).estimator, config.estimator.static_chunk_size
    x, mu, cond = (torch.randn(2, config.mel_bands, frames) for _ in range(3))
    speaker, time = torch.randn(2, config.mel_bands), torch.zeros(1)
    rope, modulation = estimator.rotary_embed(torch.arange(frames)), estimator.modulation(time)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        estimator.velocity(x, mu, speaker, cond, modulation, rope, None)
    layout = CacheLayout.of(config, "float32", steps=1)
    work = flow_work(config, layout, "float32", 1, frames, 0)
    conditions = 2 * config.block_tokens * 7 * config.pre_lookahead_channels * config.input_size
    assert counter.get_total_flops() == work.single - conditions


def test_the_vocoder_against_its_modules_and_torchs_counter() -> None:
    config = ModelConfig.read(TINY).vocoder
    assert isinstance(config, HiFTConfig)
    hift, frames = HiFT(config), 50
    hift.freeze()
    mel, samples = torch.randn(1, config.in_channels, frames), frames * config.samples_per_frame
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hift.decode(mel, torch.randn(1, 1, samples))
        hift.f0_predictor(mel)
    work = vocoder_work(config, 1, frames)
    assert work.single + work.double == pytest.approx(counter.get_total_flops(), rel=0.01)
    network = sum(
        (module.phases if isinstance(module, UpConv) else module.weight).numel()
        for name, module in hift.named_modules()
        if isinstance(module, torch.nn.Conv1d) and "f0" not in name
    )
    pitch = sum(weight.numel() for weight in hift.f0_predictor.parameters() if weight.dim() > 1)
    assert work.weight_bytes == 4 * network + 8 * pitch
