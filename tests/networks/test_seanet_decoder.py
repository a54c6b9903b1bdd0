"""Decoder of Mimi and Pocket TTS: length, causality, window and pieces."""

from __future__ import annotations

import pytest
import torch

from testkit.models.random_weights import fill
from testkit.pieces import in_pieces
from testkit.utterances import off
from token2wav.families.pocket_tts.config import PocketSizes
from token2wav.layers.streaming import OFFLINE
from token2wav.networks.seanet_decoder import ELU, SeanetDecoder

WIDTH, STRIDE, WINDOW, LAYERS, FRAMES = 8, 2, 5, 2, 40
SIZES = PocketSizes(
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
SAMPLES = SIZES.frame_samples
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def decoder() -> SeanetDecoder:
    decoder = fill(SeanetDecoder(SIZES))
    decoder.freeze()
    return decoder


def decode(decoder: SeanetDecoder, latents: torch.Tensor) -> torch.Tensor:
    return decoder.decode(latents, OFFLINE)


def test_a_frame_has_its_samples_and_none_is_late(decoder: SeanetDecoder) -> None:
    assert (decoder.frame_samples, decoder.output_delay) == (2 * 3 * 2, 0)
    assert decode(decoder, torch.randn(3, WIDTH, FRAMES)).shape == (3, 1, SAMPLES * FRAMES)


@pytest.mark.parametrize("lengths", [[1] * FRAMES, [7, 1, 30, 2], [FRAMES]], ids=str)
def test_pieces_equal_the_whole(decoder: SeanetDecoder, lengths: list[int]) -> None:
    x = torch.randn(2, WIDTH, FRAMES)
    audio = in_pieces(decoder, x, lengths, delay=0, ratio=SAMPLES, compute=decoder.decode)
    assert off(audio, decode(decoder, x)) <= ROUNDING


def test_a_batch_equals_each_row_alone(decoder: SeanetDecoder) -> None:
    x = torch.randn(3, WIDTH, FRAMES)
    alone = torch.cat([decode(decoder, row) for row in x.split(1)])
    assert off(decode(decoder, x), alone) <= ROUNDING


def test_a_latent_reaches_as_far_as_windows_and_kernels() -> None:
    """Nothing before a latent depends on it. In float64 the last of its effects are above 0."""
    decoder = fill(SeanetDecoder(SIZES)).double()
    decoder.freeze()
    x = torch.randn(1, WIDTH, FRAMES, dtype=torch.float64)
    changed = x.clone()
    changed[:, :, 10] += 1
    moved = (decode(decoder, changed) - decode(decoder, x))[0, 0].nonzero().flatten()
    # 1 latent by the first upsampling, 3 by the first kernel of 7 positions, and less than 3 by
    # the smaller kernels
    windows = LAYERS * (WINDOW - 1) // STRIDE
    assert int(moved.min()) == 10 * SAMPLES
    assert 1 + windows + 3 < int(moved.max()) / SAMPLES - 10 < 1 + windows + 3 + 3 + 1


def test_the_activation_writes_its_result() -> None:
    x, out = torch.randn(2, 3, 4), torch.empty(2, 3, 4)
    assert ELU()(x, out) is out
    assert torch.equal(out, torch.nn.functional.elu(x))
