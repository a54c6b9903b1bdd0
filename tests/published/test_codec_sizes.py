"""Sizes of shared decoders: samples of a frame, and sizes that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from token2wav.errors import ConfigError
from token2wav.families.pocket_tts.config import PocketSizes
from token2wav.published.codec_sizes import SymmetricSizes


def test_a_decoder_mirrors_its_encoder() -> None:
    sizes = SymmetricSizes()
    assert (sizes.rates, sizes.frame_samples, sizes.latents) == ((8, 8, 4, 2), 512, 1024)
    assert SymmetricSizes.of_decoder((8, 8, 4, 2), 1536, 1024) == SymmetricSizes(
        downsampling_ratios=(2, 4, 8, 8), decoder_hidden_size=1536, hidden_size=1024
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"downsampling_ratios": ()}, "downsampling_ratios: empty"),
        ({"upsampling_ratios": (8, 8)}, "upsampling_ratios: 64 samples for each frame, but"),
        ({"decoder_hidden_size": 1000}, "decoder_hidden_size: 1000 cannot be halved 4 times"),
        ({"encoder_hidden_size": 8192}, "131072 channels of the latents; at most 65536"),
    ],
)
def test_symmetric_sizes_that_do_not_fit(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SymmetricSizes(**sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"use_causal_conv": False}, "use_causal_conv: False is not supported"),
        ({"upsampling_ratios": ()}, "upsampling_ratios: empty"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4, but num_attention_heads is 8"),
        ({"upsample_groups": 7}, "upsample_groups: 7 does not divide hidden_size, 512"),
        ({"head_dim": 63}, "head_dim: 63 is odd"),
    ],
)
def test_seanet_sizes_that_do_not_fit(sizes: dict[str, Any], message: str) -> None:
    assert PocketSizes().frame_samples == 1920
    with pytest.raises(ConfigError, match=message):
        PocketSizes(**sizes)
