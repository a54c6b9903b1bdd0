"""Step-Audio2's estimator: chunks give the same velocities as the whole sequence."""

from __future__ import annotations

import pytest
import torch

from testkit.kept_context import KeptContext
from testkit.models.random_weights import fill
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.step_audio_dit import StepAudioDiT

BANDS, BLOCK, FRAMES = 6, 10, 34
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def estimator() -> StepAudioDiT:
    return fill(StepAudioDiT(BANDS, 16, heads=2, dim_head=4, layers=3))


def test_chunks_give_the_whole(estimator: StepAudioDiT) -> None:
    x, mu, cond = (torch.randn(2, BANDS, FRAMES) for _ in range(3))
    speaker, modulation = torch.randn(2, BANDS), estimator.modulation(torch.tensor([0.3]))
    bias = attention_bias(block_mask(BlockGrid(BLOCK), FRAMES))
    whole = estimator.velocity(x, estimator.project_conditions(mu, speaker, cond), modulation, bias)
    context, pieces = KeptContext(estimator.conv_state_shapes, rows=2), []
    for start in range(0, FRAMES, BLOCK):
        piece, own_mu, own_cond = (value[:, :, start : start + BLOCK] for value in (x, mu, cond))
        conditions = estimator.project_conditions(own_mu, speaker, own_cond)
        pieces.append(estimator.velocity(piece, conditions, modulation, None, context))
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, atol=ROUNDING, rtol=0)
    assert len(context.keys) == 3
    assert len(context.tails) == 2 * 3
