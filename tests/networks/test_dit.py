"""CosyVoice3's estimator: chunks, batches, positions of its first head, and its precision."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from testkit.kept_context import KeptContext
from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.dit import ConvPositionEmbedding, DiT, RotaryEmbedding, rotate_first_head
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.published.sizes import EstimatorConfig

BANDS, BLOCK, FRAMES = 6, 10, 34
WIDTH, DEPTH, DIM_HEAD = 32, 3, 8
SIZES = EstimatorConfig(
    dim=WIDTH,
    depth=DEPTH,
    heads=2,
    dim_head=DIM_HEAD,
    ff_mult=2,
    mel_dim=BANDS,
    mu_dim=BANDS,
    spk_dim=BANDS,
    out_channels=BANDS,
    static_chunk_size=BLOCK,
)
TIME = torch.tensor([0.3])
ROUNDING = 1e-5


@pytest.fixture(scope="module", params=[None, True], ids=["plain", "long skip"])
def estimator(request: pytest.FixtureRequest) -> DiT:
    return fill(DiT(replace(SIZES, long_skip_connection=request.param)))


def velocity(
    estimator: DiT,
    frames: torch.Tensor,
    speakers: torch.Tensor,
    start: int = 0,
    context: KeptContext | None = None,
) -> torch.Tensor:
    """Computes the velocity of states, mu and prompt mel, which are `frames` (B, 3 * bands, T).

    Without a context, they are whole sequences under the block mask.
    """
    x, mu, cond = frames.chunk(3, dim=1)
    count, bias = x.shape[2], None
    if context is None:
        bias = attention_bias(block_mask(BlockGrid(BLOCK), count))
    conditions = estimator.project_conditions(mu, speakers, cond)
    rope = estimator.rope(start + torch.arange(count))
    return estimator.velocity(x, conditions, estimator.modulation(TIME), bias, context, rope=rope)


def test_chunks_give_the_whole(estimator: DiT) -> None:
    frames, speakers = torch.randn(2, 3 * BANDS, FRAMES), torch.randn(2, BANDS)
    whole = velocity(estimator, frames, speakers)
    assert whole.shape == (2, BANDS, FRAMES)
    context = KeptContext(estimator.conv_state_shapes, rows=2)
    pieces = [
        velocity(estimator, chunk, speakers, BLOCK * number, context)
        for number, chunk in enumerate(frames.split(BLOCK, dim=2))
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, atol=ROUNDING, rtol=0)
    assert (len(context.keys), len(context.tails)) == (DEPTH, 2)


@pytest.mark.parametrize("kind", ["streaming", "full"])
def test_public_velocity_with_a_long_skip_connection(kind: str) -> None:
    golden = FamilyGolden("cosyvoice3", "long_skip")
    estimator = fill(DiT(EstimatorConfig(**golden.sizes)))
    inputs = {name: golden[name] for name in ("x", "mask", "mu", "t", "spks", "cond")}
    result = estimator(**inputs, streaming=kind == "streaming")
    torch.testing.assert_close(result, golden[f"velocity_{kind}"], atol=ROUNDING, rtol=0)


def test_a_batch_equals_each_row_alone(estimator: DiT) -> None:
    frames, speakers = torch.randn(3, 3 * BANDS, FRAMES), torch.randn(3, BANDS)
    alone = [
        velocity(estimator, row, speaker)
        for row, speaker in zip(frames.split(1), speakers.split(1), strict=True)
    ]
    together = velocity(estimator, frames, speakers)
    torch.testing.assert_close(together, torch.cat(alone), atol=ROUNDING, rtol=0)


def test_only_the_first_head_has_positions() -> None:
    """A score of the first head depends on the distance of two frames alone."""
    x = torch.randn(1, 2 * DIM_HEAD).expand(40, -1)
    rotated = rotate_first_head(x, *RotaryEmbedding(DIM_HEAD)(torch.arange(40)))
    assert torch.equal(rotated[:, DIM_HEAD:], x[:, DIM_HEAD:])
    scores = rotated[:, :DIM_HEAD] @ rotated[:, :DIM_HEAD].T
    by_distance = [scores.diagonal(distance) for distance in (0, 1, 7)]
    for diagonal in by_distance:
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert len({round(float(diagonal[0]), 2) for diagonal in by_distance}) == 3


def test_blocks_of_guided_attention_are_convolved_alone() -> None:
    embedding, x = fill(ConvPositionEmbedding(WIDTH, block_frames=BLOCK)), torch.randn(2, 34, WIDTH)
    alone = torch.cat([embedding(block) for block in x.split(BLOCK, dim=1)], dim=1)
    torch.testing.assert_close(embedding(x), alone, atol=ROUNDING, rtol=0)


def test_half_precision_returns_float32(estimator: DiT) -> None:
    frames, speakers = torch.randn(1, 3 * BANDS, FRAMES), torch.randn(1, BANDS)
    halved = deepcopy(estimator)
    halved.halve()
    assert (estimator.score_dtype, halved.score_dtype) == (torch.float32, torch.float16)
    exact, rounded = (velocity(network, frames, speakers) for network in (estimator, halved))
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - exact).abs().max()) < 0.01 * float(exact.abs().max())


def test_velocity_needs_no_weights_of_the_time() -> None:
    estimator, frames = fill(DiT(SIZES)), torch.randn(1, BANDS, FRAMES)
    blocks, last = modulation = estimator.modulation(TIME)
    assert (blocks.shape, last.shape) == ((DEPTH, 1, 6, WIDTH), (1, 2, WIDTH))
    conditions = estimator.project_conditions(frames, frames[:, :, 0], frames)
    rope = estimator.rope(torch.arange(FRAMES))
    before = estimator.velocity(frames, conditions, modulation, None, rope=rope)
    estimator.drop_time_weights()
    after = estimator.velocity(frames, conditions, modulation, None, rope=rope)
    assert torch.equal(before, after)
