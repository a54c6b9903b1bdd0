"""Published weights of codecs: their names in the network, and their shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from token2wav.families.dac.config import WEIGHTS
from token2wav.networks.codec_weights import converted_weights, layer_name
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


def published_weights(network: SymmetricCodec) -> dict[str, torch.Tensor]:
    """Returns weights under the names of `transformers`, with a number for each codebook."""
    published = {}
    for name, value in network.state_dict().items():
        if not name.startswith("quantizer."):
            slopes = name.endswith(".alpha")
            published[name] = torch.ones(1, *value.shape, 1) if slopes else value
    shapes = {"codebook.weight": (1024, 8), "out_proj.weight": (4, 8, 1), "out_proj.bias": (4,)}
    for number in (1, 0):
        for name, shape in shapes.items():
            book = torch.full(shape, float(number))
            published[f"quantizer.quantizers.{number}.{name}"] = book
    return published


def spelled(weights: dict[str, torch.Tensor], ends: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Divides the weights of convolutions into lengths and directions of a weight norm."""
    divided = {}
    for name, value in weights.items():
        if value.dim() == 3 and name.endswith(".weight") and "out_proj" not in name:
            stem = name.removesuffix(".weight")
            divided[stem + ends[0]] = value.norm(dim=(1, 2), keepdim=True)
            divided[stem + ends[1]] = 2 * value  # the length of a direction has no effect
        else:
            divided[name] = value
    return divided


@pytest.mark.parametrize(
    "ends",
    [
        (".weight_g", ".weight_v"),
        (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    ],
)
def test_weight_norm_has_any_spelling(ends: tuple[str, str]) -> None:
    network = SymmetricCodec(SIZES)
    published = published_weights(network)
    folded = converted_weights(network, published, Path("weights"), WEIGHTS)
    normed = converted_weights(network, spelled(published, ends), Path("weights"), WEIGHTS)
    assert folded.keys() == normed.keys() == network.state_dict().keys()
    for name, value in folded.items():
        torch.testing.assert_close(normed[name], value)
    assert folded["quantizer.bias"][:, 0].tolist() == [0.0, 1.0]
    assert folded["decoder.snake1.alpha"].shape == (2,)
