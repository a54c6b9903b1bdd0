"""Reader of the published weights of all codecs, by the table of names of a codec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.networks.moshi_layers import attention_rows
from token2wav.networks.published_name import published_name
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    fold_weight_norm,
    read_state,
)
from token2wav.published.weight_names import Codebooks, WeightNames

# decoder.model.LAYER.NAME, decoder.model.LAYER.block.INDEX.NAME for a layer of a block, and
# decoder.model.LAYER.block.INDEX.block.INDEX.NAME for a layer of a residual unit
_LAYER = re.compile(r"model\.(\d{1,2})\.(?:block\.(\d)\.)?(?:block\.(\d)\.)?(.+)")
_IN_UNIT = ("snake1", "conv1", "snake2", "conv2")
_LEAST_USAGE = 1e-5  # lower bound of a usage count, by which the sum of an entry is divided


def codec_weights(network: nn.Module, path: Path, names: WeightNames) -> dict[str, torch.Tensor]:
    return converted_weights(
        network, read_state(path, names.parts, wrappers=names.wrappers), path, names
    )


def converted_weights(
    network: nn.Module, state: Mapping[str, Any], path: Path, names: WeightNames
) -> dict[str, torch.Tensor]:
    """Converts published weights to weights of a network. It renames them, folds weight norm, joins
    codebooks, splits projections of attention, and removes dimensions of one.
    """
    decoders = {
        f"{name}.": module
        for name, module in network.named_modules()
        if isinstance(module, SymmetricDecoder)
    }

    def current_name(name: str) -> str:
        for pattern, replacement in names.renamed:
            name = re.sub(pattern, replacement, name)
        for start, decoder in decoders.items():
            if name.startswith(start):
                name = start + layer_name(name.removeprefix(start), decoder)
        return name

    used = {name: value for name, value in state.items() if not re.search(names.unused, str(name))}
    weights = fold_weight_norm(floating_tensors(used, path, current_name), path)
    for codebooks in names.codebooks:
        weights |= _joined(network, weights, codebooks, path)
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    split: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        split |= attention_rows(name, _squeezed(value, shapes.get(name)), network)
    return fitting_weights(
        network, split, path, lambda name: published_name(name, used, current_name)
    )


def layer_name(name: str, decoder: SymmetricDecoder) -> str:
    """Returns the name in `SymmetricDecoder` of a weight of `descript-audio-codec` or `snac`, which
    number their layers. A name of another form stays as it is.
    """
    layers = [
        (child, block)
        for child, layer in decoder.named_children()
        for block in (range(len(layer)) if child == "block" else (None,))  # type: ignore[arg-type]
    ]
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= len(layers):
        return name
    (child, block), (inner, in_unit, parameter) = layers[int(match[1])], match.groups()[1:]
    if block is None:
        return f"{child}.{parameter}" if inner is None else name
    start = f"block.{block}"
    if inner is None:
        return f"{start}.{parameter}" if parameter.startswith("scale.") else name
    blocks: Any = decoder.block
    children = [layer for layer, _ in blocks[block].named_children() if layer != "scale"]
    if int(inner) >= len(children):
        return name
    layer = f"{start}.{children[int(inner)]}"
    if in_unit is None:  # Qwen3 has names inside a residual unit
        return f"{layer}.{parameter}"
    return f"{layer}.{_IN_UNIT[int(in_unit)]}.{parameter}" if int(in_unit) < 4 else name


def _joined(
    network: nn.Module, weights: dict[str, torch.Tensor], codebooks: Codebooks, path: Path
) -> dict[str, torch.Tensor]:
    """Moves the weights of codebooks out of `weights`, and returns the weights of their module."""
    books: dict[int, dict[str, torch.Tensor]] = {}
    for name in list(weights):
        match = re.match(codebooks.pattern, name)
        if match and (part := name[match.end() :]) in codebooks.parts:
            book = books.setdefault(int(match[1]), {})
            if part in book:  # such as books.0.weight and books.00.weight
                raise CheckpointError(f"{path}: '{name}' appears twice, under two numbers")
            book[part] = weights.pop(name)
    if not books:
        return {}
    module, owner = codebooks.module, f"{path}: {codebooks.module}"
    entries, *others = (_stacked(books, part, owner) for part in codebooks.parts)
    joined = {"entries": entries}
    if len(others) == 1:  # sums of training vectors, and their numbers
        [uses] = others
        if entries.dim() != 3 or uses.shape != entries.shape[:2]:
            shapes = f"sums {tuple(entries.shape)} and numbers {tuple(uses.shape)}"
            raise CheckpointError(f"{owner}: codebooks of {shapes} do not fit")
        joined["entries"] = entries / uses.clamp(min=_LEAST_USAGE)[..., None]
    elif others:
        weight, bias = others
        # (count, width, dim[, 1]) to (count, dim, width)
        weight = weight.flatten(2).transpose(1, 2) if weight.dim() > 2 else weight
        joined |= {"weight": weight, "bias": bias}
    expected = len(network.get_submodule(module).get_parameter("entries"))
    if len(books) != expected:
        raise CheckpointError(f"{owner}: {len(books)} codebooks in the file, expected {expected}")
    return {f"{module}.{name}": value for name, value in joined.items()}


def _stacked(books: dict[int, dict[str, torch.Tensor]], part: str, owner: str) -> torch.Tensor:
    """Joins one tensor of each codebook. `owner` is the name of the codebooks for messages."""
    tensors = []
    for number in range(len(books)):
        if (value := books.get(number, {}).get(part)) is None:
            raise CheckpointError(f"{owner}: codebook {number} lacks {part}")
        tensors.append(value.float())
    if len({value.shape for value in tensors}) > 1:
        raise CheckpointError(f"{owner}: {part} has different shapes in the codebooks")
    return torch.stack(tensors)


def _squeezed(value: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
    """Removes dimensions of one that the network does not have, such as those of a convolution with
    a kernel of one, or of the slopes (1, channels, 1) of an activation.
    """
    if shape is None or value.dim() <= len(shape):
        return value
    sizes = [size for size in value.shape if size != 1]
    return value.reshape(shape) if sizes == [size for size in shape if size != 1] else value
