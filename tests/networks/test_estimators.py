"""Estimators in chunks, with states of convolutions and attention, equal the whole sequence.
`test_public_estimators.py` compares them with their public code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from testkit.kept_context import KeptContext
from testkit.models.random_weights import fill
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.dit import DiT
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.step_audio_dit import StepAudioDiT
from token2wav.networks.unet import UNet
from token2wav.published.sizes import EstimatorConfig

BANDS, BLOCK, FRAMES = 6, 10, 34
TIME = torch.tensor([0.3])
ROUNDING = 1e-5


def a_dit(long_skip: Literal[True] | None) -> DiT:
    sizes = EstimatorConfig(
        dim=32,
        depth=3,
        heads=2,
        dim_head=8,
        ff_mult=2,
        mel_dim=BANDS,
        mu_dim=BANDS,
        spk_dim=BANDS,
        out_channels=BANDS,
        static_chunk_size=BLOCK,
        long_skip_connection=long_skip,
    )
    return DiT(sizes)


@dataclass(frozen=True)
class Row:
    """Estimator, and its number of attention layers and of convolutions with a state."""

    make: Callable[[], Any]
    keys: int
    tails: int


ROWS = {
    "dit": Row(lambda: a_dit(None), 3, 2),
    "dit with a long skip": Row(lambda: a_dit(True), 3, 2),
    "unet": Row(lambda: UNet(BANDS, 16, 2, 4, mid_blocks=2, layers=2, block_frames=BLOCK), 8, 11),
    "step audio": Row(lambda: StepAudioDiT(BANDS, 16, heads=2, dim_head=4, layers=3), 3, 6),
}


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


@pytest.fixture(scope="module")
def estimator(row: Row) -> Any:
    return fill(row.make())


def velocity(
    estimator: Any,
    frames: torch.Tensor,
    speakers: torch.Tensor,
    start: int = 0,
    context: KeptContext | None = None,
) -> torch.Tensor:
    """Computes the velocity of states, mu and prompt mel, which are `frames` (B, 3 * bands, T).

    Without a context, they are whole sequences under the block mask.
    """
    x, mu, cond = frames.chunk(3, dim=1)
    count, bias, rope = x.shape[2], None, {}
    if context is None:
        bias = attention_bias(block_mask(BlockGrid(BLOCK), count))
    if isinstance(estimator, DiT):
        rope = {"rope": estimator.rope(start + torch.arange(count))}
    conditions = estimator.project_conditions(mu, speakers, cond)
    result: torch.Tensor = estimator.velocity(
        x, conditions, estimator.modulation(TIME), bias, context, **rope
    )
    return result


def test_chunks_give_the_whole(row: Row, estimator: Any) -> None:
    frames, speakers = torch.randn(2, 3 * BANDS, FRAMES), torch.randn(2, BANDS)
    whole = velocity(estimator, frames, speakers)
    assert whole.shape == (2, BANDS, FRAMES)
    context = KeptContext(estimator.conv_state_shapes, rows=2)
    pieces = [
        velocity(estimator, chunk, speakers, BLOCK * number, context)
        for number, chunk in enumerate(frames.split(BLOCK, dim=2))
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, atol=ROUNDING, rtol=0)
    assert (len(context.keys), len(context.tails)) == (row.keys, row.tails)


def test_a_batch_equals_each_row_alone(estimator: Any) -> None:
    frames, speakers = torch.randn(3, 3 * BANDS, FRAMES), torch.randn(3, BANDS)
    alone = [
        velocity(estimator, one, speaker)
        for one, speaker in zip(frames.split(1), speakers.split(1), strict=True)
    ]
    together = velocity(estimator, frames, speakers)
    torch.testing.assert_close(together, torch.cat(alone), atol=ROUNDING, rtol=0)


def test_the_time_enters_every_block_of_a_unet() -> None:
    unet = fill(ROWS["unet"].make())
    (early,), (late,) = (unet.modulation(torch.tensor([t])) for t in (0.1, 0.9))
    assert early.shape == (4, 1, 16)
    assert ((early - late).abs().amax(dim=2) > 0).all()


def test_half_precision_returns_float32() -> None:
    frames, speakers = torch.randn(1, 3 * BANDS, FRAMES), torch.randn(1, BANDS)
    exact, rounded = fill(a_dit(None)), fill(a_dit(None))
    rounded.halve()
    assert (exact.score_dtype, rounded.score_dtype) == (torch.float32, torch.float16)
    expected, result = (velocity(network, frames, speakers) for network in (exact, rounded))
    assert result.dtype == torch.float32
    assert 0 < float((result - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_velocity_needs_no_weights_of_the_time() -> None:
    estimator, frames = fill(a_dit(None)), torch.randn(1, BANDS, FRAMES)
    blocks, last = modulation = estimator.modulation(TIME)
    assert (blocks.shape, last.shape) == ((3, 1, 6, 32), (1, 2, 32))
    conditions = estimator.project_conditions(frames, frames[:, :, 0], frames)
    rope = estimator.rope(torch.arange(FRAMES))
    before = estimator.velocity(frames, conditions, modulation, None, rope=rope)
    estimator.drop_time_weights()
    after = estimator.velocity(frames, conditions, modulation, None, rope=rope)
    assert torch.equal(before, after)
