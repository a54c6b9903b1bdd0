"""ECAPA-TDNN: vectors of recordings of any length, in batches and alone.

`tests/families/qwen25_omni` compares the vectors with those of the public code.
"""

from __future__ import annotations

import pytest
import torch

from testkit.models.random_weights import fill
from token2wav.networks.ecapa import Ecapa, Res2Net, StatisticsPooling
from token2wav.published.sizes import EcapaConfig

SIZES = EcapaConfig(
    mel_dim=8,
    dim=12,
    channels=(16, 16, 16, 32),
    kernel_sizes=(5, 3, 3, 1),
    dilations=(1, 2, 3, 1),
    attention_channels=4,
    res2net_scale=4,
    se_channels=4,
)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def network() -> Ecapa:
    return fill(Ecapa(SIZES))


@pytest.mark.parametrize("frames", [4, 5, 100])
def test_a_vector_for_each_mel_of_a_batch(network: Ecapa, frames: int) -> None:
    mels = torch.randn(3, SIZES.mel_dim, frames)
    vectors = network(mels)
    assert vectors.shape == (3, SIZES.dim)
    alone = torch.cat([network(mel) for mel in mels.split(1)])
    torch.testing.assert_close(vectors, alone, atol=ROUNDING, rtol=0)
    assert (vectors[0] - vectors[1]).abs().max() > 0.01


def test_the_least_number_of_frames(network: Ecapa) -> None:
    """The reflection of an edge needs one frame more than a convolution reaches."""
    assert SIZES.least_frames == 4
    with pytest.raises(RuntimeError, match="Padding size"):
        network(torch.zeros(1, SIZES.mel_dim, 3))


def test_the_length_of_a_constant_mel_changes_nothing(network: Ecapa) -> None:
    """Edges are padded with their reflection, and not with zeros."""
    mel = torch.randn(1, SIZES.mel_dim, 1)
    short, long = (network(mel.expand(-1, -1, frames)) for frames in (4, 60))
    torch.testing.assert_close(short, long, atol=1e-4, rtol=0)


def test_each_part_of_a_block_gets_the_output_of_the_part_before() -> None:
    block, x = fill(Res2Net(16, scale=4, kernel=3, dilation=2)), torch.randn(2, 16, 20)
    outputs, inputs = block(x).chunk(4, dim=1), x.chunk(4, dim=1)
    assert torch.equal(outputs[0], inputs[0])  # stays, and is no part of the next one
    assert torch.equal(outputs[1], block.blocks[0](inputs[1]))
    assert torch.equal(outputs[2], block.blocks[1](inputs[2] + outputs[1]))
    assert torch.equal(outputs[3], block.blocks[2](inputs[3] + outputs[2]))


def test_statistics_are_those_of_the_frames_that_attention_selects() -> None:
    pooling, x = fill(StatisticsPooling(6, 4)), torch.randn(2, 6, 30)
    torch.nn.init.zeros_(pooling.conv.weight)  # every frame gets the same attention
    mean, deviation = pooling(x)[:, :, 0].chunk(2, dim=1)
    torch.testing.assert_close(mean, x.mean(dim=2), atol=ROUNDING, rtol=0)
    torch.testing.assert_close(deviation, x.std(dim=2, correction=0), atol=ROUNDING, rtol=0)
