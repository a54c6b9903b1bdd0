"""Decoder of DAC and its relatives: lengths, delays and pieces, for every variant of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testkit.models.random_weights import fill
from testkit.pieces import in_pieces
from testkit.utterances import off
from token2wav.layers.streaming import FreezableLayer
from token2wav.networks.symmetric_decoder import ChannelScale, SymmetricDecoder
from token2wav.published.codec_sizes import SymmetricSizes

LATENTS, RATES, SAMPLES, FRAMES = 5, (3, 2), 6, 50
SIZES = SymmetricSizes.of_decoder(RATES, channels=16, latents=LATENTS)
VARIANTS: dict[str, dict[str, Any]] = {
    "DAC": {},
    "Higgs Audio": {"whole_frames": True},
    "SNAC": {"whole_frames": True, "depthwise": True, "noise": True},
    "causal DAC": {"causal": True},
    "VoxCPM": {"causal": True, "depthwise": True, "scaled": True},
}
CAUSAL = ("causal DAC", "VoxCPM")
ROUNDING = 1e-5  # networks are in float64, and the states of their delays in float32


@pytest.fixture(scope="module", params=VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    variant: str = request.param
    return variant


def a_decoder(name: str) -> SymmetricDecoder:
    decoder = fill(SymmetricDecoder(SIZES, **VARIANTS[name])).double()
    for module in decoder.modules():
        if isinstance(module, FreezableLayer):
            module.freeze()
    return decoder


def latents(rows: int) -> torch.Tensor:
    return torch.randn(rows, LATENTS, FRAMES, dtype=torch.float64)


def test_every_frame_has_its_samples(name: str) -> None:
    """An upsampling of DAC by an odd factor returns one output less."""
    decoder = a_decoder(name)
    timing, audio = decoder.place(), decoder(latents(2))
    assert timing.extra == (-RATES[1] if name == "DAC" else 0)
    assert audio.shape == (2, 1, SAMPLES * FRAMES + timing.extra)


@pytest.mark.parametrize("lengths", [[24, 16, 10], [40, 1, 4, 5], [FRAMES]], ids=str)
def test_pieces_equal_the_whole(name: str, lengths: list[int]) -> None:
    """A stream starts with more latents than the delay of a symmetric decoder, 143 samples."""
    decoder, x = a_decoder(name), latents(2)
    delay, whole = decoder.place().delay, decoder(x)
    audio = in_pieces(decoder, x, lengths, delay=delay, ratio=SAMPLES)
    assert off(audio[:, :, : whole.shape[2]], whole) <= ROUNDING


def test_a_batch_equals_each_row_alone(name: str) -> None:
    decoder, x = a_decoder(name), latents(3)
    decoder.place()
    assert off(decoder(x), torch.cat([decoder(row) for row in x.split(1)])) <= ROUNDING


def test_the_delay_is_the_look_ahead(name: str) -> None:
    decoder, x = a_decoder(name), latents(1)
    delay, changed = decoder.place().delay, x.clone()
    changed[:, :, 40:] += 1
    moved = (decoder(changed) - decoder(x))[0, 0].abs().nonzero().flatten()
    assert int(moved.min()) == SAMPLES * 40 - delay
    assert (delay == 0) == (name in CAUSAL)


def test_a_scale_and_a_bias_for_every_channel() -> None:
    scale, x = fill(ChannelScale(4)), torch.randn(2, 4, 7)
    expected = x * scale.weight[:, None] + scale.bias[:, None]
    torch.testing.assert_close(scale(x), expected)
