"""Published weights of DAC's decoder: their names in `SymmetricDecoder`, and their shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from token2wav.networks.codec_weights import BOOK, converted, transformers_name


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
    ],
)
def test_names_of_two_blocks(published: str, name: str) -> None:
    assert transformers_name(f"decoder.{published}", blocks=2) == f"decoder.{name}"


def test_codebooks_are_joined_and_slopes_are_flat() -> None:
    shapes = {"codebook.weight": (5, 3), "out_proj.weight": (4, 3, 1), "out_proj.bias": (4,)}
    published = {
        f"quantizer.quantizers.{number}.{name}": torch.full(shape, float(number))
        for number in (1, 0)
        for name, shape in shapes.items()
    }
    published["decoder.snake1.alpha"] = torch.ones(1, 6, 1)
    weights = converted(published, BOOK, Path("weights"))
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "decoder.snake1.alpha": (6,),
        "quantizer.entries": (2, 5, 3),
        "quantizer.weight": (2, 3, 4),
        "quantizer.bias": (2, 4),
    }
    assert weights["quantizer.bias"][:, 0].tolist() == [0.0, 1.0]
