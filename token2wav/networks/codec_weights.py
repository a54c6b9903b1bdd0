"""Published weights of codebooks and of a symmetric decoder, as `transformers`,
`descript-audio-codec` and `snac` name them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from token2wav.layers.codebooks import stacked_projections
from token2wav.networks.weights import fold_weight_norm

BOOK = ("codebook.weight", "out_proj.weight", "out_proj.bias")  # weights of a codebook
_IN_BLOCK = ("snake1", "conv_t1")  # layers of a block before its residual units
_CODEBOOK = re.compile(r"quantizer\.quantizers\.(\d{1,3})\.(.+)")

# decoder.model.LAYER.NAME, decoder.model.LAYER.block.INDEX.NAME for a layer of a block, and
# decoder.model.LAYER.block.INDEX.block.INDEX.NAME for a layer of a residual unit
_LAYER = re.compile(r"decoder\.model\.(\d{1,2})\.(?:block\.(\d)\.)?(?:block\.(\d)\.)?(.+)")
_IN_UNIT = ("snake1", "conv1", "snake2", "conv2")


def decoder_name(name: str, layers: Sequence[str], in_block: Sequence[str]) -> str:
    """Returns the name that a weight has in `SymmetricDecoder`. A name of another form stays as it
    is.

    Args:
        layers: names of the layers in their published order; "block" for an upsampling block.
    """
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= len(layers):
        return name
    layer, (block_layer, unit_layer, parameter) = int(match[1]), match.groups()[1:]
    if layers[layer] != "block":
        return f"decoder.{layers[layer]}.{parameter}" if block_layer is None else name
    start = f"decoder.block.{layers[:layer].count('block')}"
    if block_layer is None:
        return name
    if unit_layer is None:
        return (
            f"{start}.{in_block[int(block_layer)]}.{parameter}"
            if int(block_layer) < len(in_block)
            else name
        )
    if int(unit_layer) >= len(_IN_UNIT):
        return name
    unit = int(block_layer) - len(in_block) + 1
    return f"{start}.res_unit{unit}.{_IN_UNIT[int(unit_layer)]}.{parameter}"


def transformers_name(name: str, blocks: int, *, depthwise: bool = False) -> str:
    """Converts a name of `descript-audio-codec`, for a decoder of plain DAC, to the name in
    `transformers`.
    """
    first = ["conv0", "conv1"] if depthwise else ["conv1"]
    return decoder_name(name, [*first, *["block"] * blocks, "snake1", "conv2"], _IN_BLOCK)


def converted(
    published: Mapping[str, torch.Tensor], book: tuple[str, str, str], path: Path
) -> dict[str, torch.Tensor]:
    """Converts published weights to weights of a network with `ProjectedCodebooks` and
    `SymmetricDecoder`: folds weight norm, joins codebooks, and flattens slopes.

    Args:
        published: weights, in the decoder under the names of `SymmetricDecoder`.
        book: names of the weights of a codebook, as for `stacked_projections`.

    Raises:
        CheckpointError: a codebook is incomplete, or two weights do not fit each other.
    """
    weights: dict[str, torch.Tensor] = {}
    books: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in plain_weights(published, path).items():
        match = _CODEBOOK.fullmatch(name)
        if match and match[2] in book:
            books.setdefault(int(match[1]), {})[match[2]] = value
        else:
            weights[name] = value
    joined = stacked_projections(books, book, path)
    return weights | {f"quantizer.{name}": value for name, value in joined.items()}


def plain_weights(published: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Folds weight norm, and flattens slopes.

    Raises:
        CheckpointError: two weights do not fit each other.
    """
    folded = fold_weight_norm(published, path)
    return {name: _flat_slopes(name, value) for name, value in folded.items()}


def _flat_slopes(name: str, value: torch.Tensor) -> torch.Tensor:
    # slopes (1, channels, 1) of an activation
    slopes = name.endswith(".alpha") and value.dim() == 3 and value.shape[::2] == (1, 1)
    return value.flatten() if slopes else value
