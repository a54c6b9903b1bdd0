"""Least and expected times of launches and chunks, against estimates that were made by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import pytest
import torch

from benchmarks.counted_chunks import ChunkWork, Streams, chunk_works
from benchmarks.counted_stages import counted_stages
from benchmarks.cublas_products import library_us
from benchmarks.launch import Launch, expected_us, least_us
from benchmarks.launch_counter import LaunchCounter
from benchmarks.models import public_configs
from token2wav import StreamConfig
from token2wav.execution.kernels import tiles
from token2wav.execution.kernels.tiles import Product, ProductSize, Tile

pytest.importorskip("triton")

FULL = "CosyVoice3"
HALF = torch.float16


def tiles_before(product: Product, size: ProductSize, device: torch.device) -> Tile:
    """Returns the tile of the rule that was in use when the estimates were made: a wide tile if it
    gives a program to each multiprocessor, else a narrow one.
    """
    if product == "vocoder":
        if size.dtype == torch.float64:
            return Tile(32, 32, 16, 4, 3)
        return Tile(64, min(64, max(16, 1 << (size.outputs - 1).bit_length())), 32, 4, 3)
    wide, narrow = {
        "heads": ((64, 64, 32), (16, 64, 64)),
        "gelu": ((64, 128, 32), (16, 64, 64)),
        "convolution": ((64, 64, 32), (16, 32, 64)),
    }[product]
    programs = size.copies * -(-size.rows // wide[0]) * -(-size.outputs // wide[1])
    return Tile(*(wide if programs >= 128 else narrow), 4, 3)


@cache
def chunk(family: str, streams: int, spoken_s: float, *, before: bool) -> ChunkWork:
    """Returns the work of a chunk of 25 tokens, with the tiles before or with those of today."""
    with patch.object(tiles, "choose", tiles_before if before else tiles.choose):
        [work] = chunk_works(family, public_configs()[family], (streams,), (spoken_s,))
    return work


# Estimates in ms, from a reading of the code by an expert, for one H200. Tolerance: 10 %.
ESTIMATES = [
    (FULL, 1, 0.0, 12.5, 12.5),
    (FULL, 64, 10.0, 150.0, 150.0),
    pytest.param("CosyVoice2", 1, 0.0, 22.0, 25.0, marks=pytest.mark.slow),
    pytest.param("Step-Audio2", 1, 0.0, 11.0, 13.0, marks=pytest.mark.slow),
    pytest.param("Chatterbox Turbo", 1, 0.0, 6.0, 7.0, marks=pytest.mark.slow),
    pytest.param("BigVGAN", 1, 0.0, 20.0, 20.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "streams", "spoken_s", "low", "high"), ESTIMATES)
def test_estimates_by_hand(
    family: str, streams: int, spoken_s: float, low: float, high: float
) -> None:
    work = chunk(family, streams, spoken_s, before=True)
    assert 0.9 * low <= work.stages["sum"].expected_ms <= 1.1 * high
    parts = [stage.expected_ms for name, stage in work.stages.items() if name != "sum"]
    assert work.stages["sum"].expected_ms == pytest.approx(sum(parts))


def test_a_layer_by_hand() -> None:
    """Estimates in us of the launches of a layer: norm, queries and so on, attention, output, norm,
    GELU, second product. Tolerance: 25 % of a launch, 10 % of the layer.
    """
    with LaunchCounter() as counter, patch.object(tiles, "choose", tiles_before):
        config = public_configs()[FULL]
        stages = counted_stages(counter, config, StreamConfig(steps=(1,))).by_name
        counted = Streams(counter, config, stages, 1).counted(25)
    flow = [each for each in counted if each.stage == "flow"]
    at = [place for place, each in enumerate(flow) if each.launch.attention]
    layer = [expected_us(each.launch, captured=True) for each in flow[at[3] : at[4]]]
    assert layer == pytest.approx([5.5, 5.5, 3.0, 13.5, 6.5, 3.0, 11.0], rel=0.25)
    assert sum(layer) == pytest.approx(48, rel=0.1)


def test_aims() -> None:
    """The aim of 64 streams is met. The aim of a first chunk, 9 ms, is missed."""
    assert chunk(FULL, 64, 10.0, before=False).stages["sum"].expected_ms <= 120
    assert chunk(FULL, 1, 0.0, before=False).stages["sum"].expected_ms <= 10


def test_no_time_is_below_the_least() -> None:
    for streams, spoken_s in ((1, 0.0), (64, 10.0)):
        for stage in chunk(FULL, streams, spoken_s, before=False).stages.values():
            assert 0 < stage.least_ms < stage.expected_ms


def test_room_of_a_batch_is_not_computed() -> None:
    """64 pieces of 50 frames take 1.96 TFLOP. The batch has room for twice as many frames, and for
    as many taps in all branches as the branch with the most has: 5.8 TFLOP.
    """
    work = chunk(FULL, 64, 10.0, before=False).stages["vocoder"]
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
    """A tile of 64 x 64 reads 128 rows of 2 kB: 2.2 us of one multiprocessor. A sum of 16,384
    numbers is split, which needs a second launch.
    """
    assert library_us(ProductSize(200, 1024, 1024, HALF)) == pytest.approx(128 * 2048 / 118e3)
    long = ProductSize(64, 64, 16384, HALF)
    unsplit = 128 * 2 * 16384 / 118e3
    assert 2.5 < library_us(long) < unsplit / 2
    assert library_us(ProductSize(1000, 1, 7, torch.float32, 512)) == 0
