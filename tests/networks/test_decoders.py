"""Shared decoders of codecs: lengths, delays and pieces, for every variant of the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from testkit.models.random_weights import fill
from token2wav.families.pocket_tts import PocketSizes
from token2wav.layers.streaming import OFFLINE, FreezableLayer
from token2wav.networks.seanet_decoder import ELU, SeanetDecoder
from token2wav.networks.symmetric_decoder import ChannelScale, SymmetricDecoder
from token2wav.published.codec_sizes import SymmetricSizes

FRAMES = 50
ROUNDING = 1e-5  # networks are in float64, and the states of their delays in float32
LATENTS, RATES = 5, (3, 2)
SYMMETRIC = SymmetricSizes.of_decoder(RATES, channels=16, latents=LATENTS)
WIDTH, STRIDE, WINDOW, LAYERS = 8, 2, 5, 2
SEANET = PocketSizes(
    hidden_size=WIDTH,
    num_filters=4,
    num_residual_layers=2,
    upsampling_ratios=(3, 2),
    upsample_groups=WIDTH,
    num_hidden_layers=LAYERS,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    sliding_window=WINDOW,
    latent_stride=STRIDE,
)


class Seanet(SeanetDecoder):
    """Decoder whose input are the latents of `decode`."""

    forward = SeanetDecoder.decode


@dataclass(frozen=True)
class Row:
    """Decoder, its samples for each frame, and samples that a whole sequence has in addition."""

    make: Callable[[], Any]
    latents: int = LATENTS
    samples: int = 6
    extra: int = 0
    causal: bool = False


def symmetric(**variant: bool) -> Callable[[], Any]:
    return lambda: SymmetricDecoder(SYMMETRIC, **variant)  # type: ignore[arg-type]


DECODERS = {
    # An upsampling of DAC by an odd factor returns one output less.
    "DAC": Row(symmetric(), extra=-RATES[1]),
    "Higgs Audio": Row(symmetric(whole_frames=True)),
    "SNAC": Row(symmetric(whole_frames=True, depthwise=True, noise=True)),
    "causal DAC": Row(symmetric(causal=True), causal=True),
    "VoxCPM": Row(symmetric(causal=True, depthwise=True, scaled=True), causal=True),
    "Mimi": Row(lambda: Seanet(SEANET), WIDTH, 12, causal=True),
}


@pytest.fixture(scope="module", params=DECODERS)
def row(request: pytest.FixtureRequest) -> Row:
    return DECODERS[request.param]


def a_decoder(row: Row) -> Any:
    decoder = fill(row.make()).double()
    if isinstance(decoder, Seanet):
        decoder.freeze()
    for module in decoder.modules():
        if isinstance(module, FreezableLayer):
            module.freeze()
    return decoder


def delay_of(decoder: Any) -> int:
    """Places the layers, and returns the samples by which the output is late."""
    return decoder.output_delay if isinstance(decoder, Seanet) else decoder.place().delay


def latents(row: Row, count: int) -> torch.Tensor:
    return torch.randn(count, row.latents, FRAMES, dtype=torch.float64)


def test_the_delay_is_the_look_ahead(row: Row) -> None:
    decoder, x = a_decoder(row), latents(row, 1)
    delay, changed = delay_of(decoder), x.clone()
    changed[:, :, 40:] += 1
    moved = (decoder(changed, OFFLINE) - decoder(x, OFFLINE))[0, 0].abs().nonzero().flatten()
    assert int(moved.min()) == row.samples * 40 - delay
    assert (delay == 0) == row.causal


def test_a_latent_of_mimi_reaches_as_far_as_windows_and_kernels() -> None:
    """In float64 the last of its effects are above 0."""
    row = DECODERS["Mimi"]
    decoder, x = a_decoder(row), latents(row, 1)
    changed = x.clone()
    changed[:, :, 10] += 1
    moved = (decoder(changed, OFFLINE) - decoder(x, OFFLINE))[0, 0].nonzero().flatten()
    # 1 latent by the first upsampling, 3 by the first kernel of 7 positions, and less than 3 by
    # the smaller kernels
    windows = LAYERS * (WINDOW - 1) // STRIDE
    assert int(moved.min()) == 10 * row.samples
    assert 1 + windows + 3 < int(moved.max()) / row.samples - 10 < 1 + windows + 3 + 3 + 1


def test_the_activation_of_mimi_writes_its_result() -> None:
    x, out = torch.randn(2, 3, 4), torch.empty(2, 3, 4)
    assert ELU()(x, out) is out
    assert torch.equal(out, torch.nn.functional.elu(x))


def test_a_scale_and_a_bias_for_every_channel() -> None:
    scale, x = fill(ChannelScale(4)), torch.randn(2, 4, 7)
    expected = x * scale.weight[:, None] + scale.bias[:, None]
    torch.testing.assert_close(scale(x), expected)
