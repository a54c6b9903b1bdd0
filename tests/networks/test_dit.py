"""CosyVoice3's estimator: its public velocity, positions of its first head, and its blocks."""

from __future__ import annotations

import pytest
import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from token2wav.networks.dit import ConvPositionEmbedding, DiT, RotaryEmbedding, rotate_first_head
from token2wav.published.sizes import EstimatorConfig

WIDTH, DIM_HEAD, BLOCK = 32, 8, 10
ROUNDING = 1e-5


@pytest.mark.parametrize("kind", ["streaming", "full"])
def test_public_velocity_with_a_long_skip_connection_and_in_half_precision(kind: str) -> None:
    golden = FamilyGolden("cosyvoice3", "long_skip")
    estimator = fill(DiT(EstimatorConfig(**golden.sizes)))
    inputs = {name: golden[name] for name in ("x", "mask", "mu", "t", "spks", "cond")}
    exact = estimator(**inputs, streaming=kind == "streaming")
    torch.testing.assert_close(exact, golden[f"velocity_{kind}"], atol=ROUNDING, rtol=0)
    estimator.halve()
    rounded = estimator(**inputs, streaming=kind == "streaming")
    assert (rounded.dtype, estimator.score_dtype) == (torch.float32, torch.float16)
    assert 0 < float((rounded - exact).abs().max()) < 0.01 * float(exact.abs().max())


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
