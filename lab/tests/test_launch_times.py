"""Least and expected times of launches and chunks, against times that a GPU took."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from lab.launches.counted_chunks import ChunkWork, Streams, chunk_works
from lab.launches.counted_stages import counted_stages
from lab.launches.cublas_products import library_us
from lab.launches.launch import Launch, expected_us, least_us
from lab.launches.launch_counter import LaunchCounter
from testkit.models.sized import public_configs
from token2wav import StreamConfig
from token2wav.kernels import products
from token2wav.kernels.tiles import ProductSize, table

pytest.importorskip("triton")

FULL = "CosyVoice3"
HALF = torch.float16


@cache
def chunk(streams: int, spoken_s: float) -> ChunkWork:
    """Returns the work of CosyVoice3 for a chunk of 25 tokens."""
    [work] = chunk_works(FULL, public_configs()[FULL], (streams,), (spoken_s,))
    return work


@pytest.fixture
def measured_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps cuBLAS from the fused products: kernels computed them when an H200 was measured."""
    monkeypatch.setattr(products, "cublas_rows", {})


@pytest.mark.usefixtures("measured_kernels")
@pytest.mark.parametrize(("spoken_s", "measured_ms"), [(0.0, 13.1), (10.0, 13.5)])
def test_chunks_of_one_stream_as_measured(spoken_s: float, measured_ms: float) -> None:
    """The times are medians on an H200 (`benchmarks/results/gpu`). Tolerance: 20 %."""
    stages = chunk.__wrapped__(1, spoken_s).stages
    assert stages["sum"].expected_ms == pytest.approx(measured_ms, rel=0.2)
    parts = [stage.expected_ms for name, stage in stages.items() if name != "sum"]
    assert stages["sum"].expected_ms == pytest.approx(sum(parts))


@pytest.mark.usefixtures("measured_kernels")
def test_a_layer_as_measured() -> None:
    """The launches of a layer in a first chunk: attention, output, norm, GELU, second product,
    norm, and queries, keys and values. The times are medians on an H200, in us, with the 0.4 us to
    the next launch. Tolerance: 35 % of a launch, 15 % of the layer.
    """
    with LaunchCounter() as counter:
        config = public_configs()[FULL]
        stages = counted_stages(counter, config, StreamConfig(steps=(1,))).by_name
        counted = Streams(counter, config, stages, 1).counted(25)
    flow = [launch for launch in counted if launch.stage == "flow"]
    indices = [index for index, launch in enumerate(flow) if launch.launch.attention]
    layer = [expected_us(launch.launch, captured=True) for launch in flow[indices[3] : indices[4]]]
    assert layer == pytest.approx([9.5, 5.6, 2.9, 7.9, 7.0, 2.9, 10.8], rel=0.35)
    assert sum(layer) == pytest.approx(46.6, rel=0.15)


def test_expected_times_do_not_rise() -> None:
    assert chunk(1, 0.0).stages["sum"].expected_ms <= 10
    assert chunk(64, 10.0).stages["sum"].expected_ms <= 95


def test_no_time_is_below_the_least() -> None:
    for streams, spoken_s in ((1, 0.0), (64, 10.0)):
        for stage in chunk(streams, spoken_s).stages.values():
            assert 0 < stage.least_ms < stage.expected_ms


def test_room_of_a_batch_is_not_computed() -> None:
    """64 pieces of 50 frames take 1.96 TFLOP. The batch has room for twice as many frames, and for
    as many taps in all branches as the branch with the most has: 5.8 TFLOP.
    """
    work = chunk(64, 10.0).stages["vocoder"]
    assert sum(work.operations.values()) == pytest.approx(1.96e12, rel=0.03)


@pytest.mark.parametrize(
    ("time", "captured", "expected"),
    [(least_us, True, 2.5), (least_us, False, 5.0), (expected_us, True, 2.5)],
)
def test_an_empty_launch(time: Callable[..., float], captured: bool, expected: float) -> None:
    assert time(Launch("add", 8.0), captured=captured) == pytest.approx(expected, abs=0.01)


def test_a_launch_takes_its_longest_part() -> None:
    """43 MB take 10 us, 7.9 GFLOP in float16 take 10 us, and the host launches a kernel in 5 us."""
    moves = Launch("copy", 43e6)
    assert least_us(moves, captured=True) == pytest.approx(10)
    assert expected_us(moves, captured=True) == pytest.approx(12.5)
    computes = Launch("product", 43e6, 15.8e9, "float16", inner_us=30.0)
    assert least_us(computes, captured=True) == pytest.approx(20)
    assert expected_us(computes, captured=True) == pytest.approx(32.5)
    assert expected_us(Launch("product", 0, inner_us=1.0), captured=False) == 5


def test_cublas_products() -> None:
    """A product of 1,024 inputs waits for 16 iterations of 64, three at a time. A sum of 16,384
    numbers is split, which needs a second launch.
    """
    latency_us = table().rates.latency_us
    assert library_us(ProductSize(200, 1024, 1024, HALF)) == pytest.approx(16 * latency_us / 3)
    long = ProductSize(64, 64, 16384, HALF)
    unsplit = 256 * latency_us / 3
    assert 2.5 < library_us(long) < unsplit / 2
    assert library_us(ProductSize(1000, 1, 7, torch.float32, 512)) == 0
