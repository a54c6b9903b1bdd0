"""Reader of the published weights of all codecs, by the table of names of a codec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.layers.codebooks import stacked_entries, stacked_parts, stacked_projections
from token2wav.networks.moshi_layers import attention_rows
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

    wanted = {
        name: value for name, value in state.items() if not re.search(names.unused, str(name))
    }
    weights = fold_weight_norm(floating_tensors(wanted, path, current_name), path)
    for codebooks in names.codebooks:
        weights |= dict(_joined(network, weights, codebooks, path))
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    split: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        split |= attention_rows(name, _squeezed(value, shapes.get(name)), network)
    return fitting_weights(network, split, path)


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
    layer = children[int(inner)]
    if layer.startswith("res_unit") != (in_unit is not None):
        return name
    if in_unit is None:
        return f"{start}.{layer}.{parameter}"
    return f"{start}.{layer}.{_IN_UNIT[int(in_unit)]}.{parameter}" if int(in_unit) < 4 else name


def _joined(
    network: nn.Module, weights: dict[str, torch.Tensor], codebooks: Codebooks, path: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Moves the weights of codebooks out of `weights`, and yields them as weights of one module."""
    books: dict[int, dict[str, torch.Tensor]] = {}
    for name in list(weights):
        match = re.match(codebooks.pattern, name)
        if match and (part := name[match.end() :]) in codebooks.parts:
            book = books.setdefault(int(match[1]), {})
            if part in book:  # such as books.0.weight and books.00.weight
                raise CheckpointError(f"{path}: '{name}' appears twice, under two numbers")
            book[part] = weights.pop(name)
    if not books:
        return
    module, parts = codebooks.module, codebooks.parts
    if len(parts) == 3:
        joined = stacked_projections(books, parts, path)
    elif len(parts) == 2:
        kind = module.rpartition(".")[2]
        joined = {"entries": stacked_entries(books, *parts, kind, path)}
    else:
        [entries] = stacked_parts(books, parts, path)
        joined = {"entries": entries}
    expected = len(network.get_submodule(module).get_parameter("entries"))
    if len(books) != expected:
        raise CheckpointError(
            f"{path}: {module}: {len(books)} codebooks in the file, expected {expected}"
        )
    yield from ((f"{module}.{name}", value) for name, value in joined.items())


def _squeezed(value: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
    """Removes dimensions of one that the network does not have, such as those of a convolution with
    a kernel of one, or of the slopes (1, channels, 1) of an activation.
    """
    if shape is None or value.dim() <= len(shape):
        return value
    sizes = [size for size in value.shape if size != 1]
    return value.reshape(shape) if sizes == [size for size in shape if size != 1] else value
