"""The causal U-Net in chunks, with states of convolutions and attention, equals the whole."""

from __future__ import annotations

import pytest
import torch

from testkit.kept_context import KeptContext
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.unet import UNet

BANDS, BLOCK, FRAMES = 6, 10, 34
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def unet() -> UNet:
    torch.manual_seed(1)
    return (
        UNet(BANDS, 16, heads=2, dim_head=4, mid_blocks=2, layers=2, block_frames=BLOCK)
        .eval()
        .requires_grad_(False)
    )


def test_chunks_give_the_whole(unet: UNet) -> None:
    x, mu, cond = (torch.randn(2, BANDS, FRAMES) for _ in range(3))
    speaker, modulation = torch.randn(2, BANDS), unet.modulation(torch.tensor([0.3]))
    allowed = block_mask(BlockGrid(BLOCK), FRAMES)
    whole = unet.velocity(
        x, unet.project_conditions(mu, speaker, cond), modulation, attention_bias(allowed)
    )
    context, pieces = KeptContext(unet.conv_state_shapes, rows=2), []
    for start in range(0, FRAMES, BLOCK):
        part = (value[:, :, start : start + BLOCK] for value in (x, mu, cond))
        piece, own_mu, own_cond = part
        conditions = unet.project_conditions(own_mu, speaker, own_cond)
        pieces.append(unet.velocity(piece, conditions, modulation, None, context))
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, atol=ROUNDING, rtol=0)
    assert len(context.keys) == 8
    assert len(context.tails) == 2 * 4 + 3


def test_the_time_enters_every_block(unet: UNet) -> None:
    (early,), (late,) = (unet.modulation(torch.tensor([t])) for t in (0.1, 0.9))
    assert early.shape == (4, 1, 16)
    assert ((early - late).abs().amax(dim=2) > 0).all()
