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

# decoder.model.LAYER.NAME, decoder.model.LAYER.block.PLACE.NAME for a layer of a block, and
# decoder.model.LAYER.block.PLACE.block.PLACE.NAME for a layer of a residual unit
_LAYER = re.compile(r"decoder\.model\.(\d{1,2})\.(?:block\.(\d)\.)?(?:block\.(\d)\.)?(.+)")
_IN_UNIT = ("snake1", "conv1", "snake2", "conv2")


def decoder_name(name: str, layers: Sequence[str], in_block: Sequence[str]) -> str:
    """Returns the name that a weight has in `SymmetricDecoder`.

    Args:
        name: published name. A name of another form is returned as it is.
        layers: names of the layers in their published order; "block" for an upsampling block.
        in_block: names of the layers of a block before its residual units.
    """
    found = _LAYER.fullmatch(name)
    if found is None or int(found[1]) >= len(layers):
        return name
    layer, (place, inner, own) = int(found[1]), found.groups()[1:]
    if layers[layer] != "block":
        return f"decoder.{layers[layer]}.{own}" if place is None else name
    start = f"decoder.block.{layers[:layer].count('block')}"
    if place is None:
        return name
    if inner is None:
        return f"{start}.{in_block[int(place)]}.{own}" if int(place) < len(in_block) else name
    if int(inner) >= len(_IN_UNIT):
        return name
    return f"{start}.res_unit{int(place) - len(in_block) + 1}.{_IN_UNIT[int(inner)]}.{own}"


def transformers_name(name: str, blocks: int) -> str:
    """Returns the name of a weight in the format of `transformers`, for a decoder of plain DAC.

    Args:
        name: name in the format of `transformers` or of `descript-audio-codec`.
        blocks: number of upsampling blocks.
    """
    return decoder_name(name, ["conv1", *["block"] * blocks, "snake1", "conv2"], _IN_BLOCK)


def converted(
    published: Mapping[str, torch.Tensor], book: tuple[str, str, str], path: Path
) -> dict[str, torch.Tensor]:
    """Converts published weights to weights of a network with `ProjectedCodebooks` and
    `SymmetricDecoder`: folds weight norm, joins codebooks, and flattens slopes.

    Args:
        published: published weights. Weights of the decoder have the names of `SymmetricDecoder`.
        book: names of the weights of a codebook, as for `stacked_projections`.
        path: file of the weights, for messages.

    Raises:
        CheckpointError: a codebook is incomplete, or two weights do not fit each other.
    """
    weights: dict[str, torch.Tensor] = {}
    books: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in fold_weight_norm(published, path).items():
        found = _CODEBOOK.fullmatch(name)
        if found and found[2] in book:
            books.setdefault(int(found[1]), {})[found[2]] = value
        else:
            weights[name] = _flat_slopes(name, value)
    joined = stacked_projections(books, book, path)
    return weights | {f"quantizer.{name}": value for name, value in joined.items()}


def _flat_slopes(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a weight, with the slopes (1, channels, 1) of an activation as (channels,)."""
    slopes = name.endswith(".alpha") and value.dim() == 3 and value.shape[::2] == (1, 1)
    return value.flatten() if slopes else value
