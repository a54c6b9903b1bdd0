"""Published weights of codecs: their names in the network, and their shapes."""

from __future__ import annotations

import pytest

from token2wav.networks.codec_weights import layer_name
from token2wav.networks.symmetric_codec import SymmetricCodec
from token2wav.published.codec_sizes import SymmetricCodecSizes

SIZES = SymmetricCodecSizes(
    downsampling_ratios=(2, 3), decoder_hidden_size=8, hidden_size=4, n_codebooks=2
)


@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("model.0.weight_v", "conv1.weight_v"),
        ("model.1.block.0.alpha", "block.0.snake1.alpha"),
        ("model.2.block.1.bias", "block.1.conv_t1.bias"),
        ("model.2.block.4.block.3.bias", "block.1.res_unit3.conv2.bias"),
        ("model.3.alpha", "snake1.alpha"),
        ("model.4.bias", "conv2.bias"),
        # names of another form stay, and the check of names rejects them
        ("model.5.bias", "model.5.bias"),
        ("model.1.alpha", "model.1.alpha"),
        ("model.1.block.2.block.4.bias", "model.1.block.2.block.4.bias"),
        ("model.1.block.0.block.1.bias", "model.1.block.0.block.1.bias"),
        ("model.1.block.5.bias", "model.1.block.5.bias"),
    ],
)
def test_names_of_two_blocks(published: str, name: str) -> None:
    assert layer_name(published, SymmetricCodec(SIZES).decoder) == name
