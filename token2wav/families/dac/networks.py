"""Family of DAC: its decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.execution.family import Family
from token2wav.families.dac.network import Dac
from token2wav.model_config import StageName
from token2wav.networks.codebooks import stacked_projections
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    fold_weight_norm,
    read_state,
)

_PARTS = ("quantizer.", "decoder.")  # the rest makes codes
_CODEBOOK = re.compile(r"quantizer\.quantizers\.(\d{1,3})\.(codebook\.weight|out_proj\.\w+)")
_ENCODING = re.compile(r"quantizer\.quantizers\.\d+\.in_proj\.\w+")  # only makes codes
_BOOK = ("codebook.weight", "out_proj.weight", "out_proj.bias")

# Names of the layers of `descript-audio-codec`, which have numbers.
_LAYER = re.compile(r"decoder\.model\.(\d{1,2})\.(?:block\.(\d)\.)?(?:block\.(\d)\.)?(\w+)")
_IN_BLOCK = ("snake1", "conv_t1")  # the residual units follow
_IN_UNIT = ("snake1", "conv1", "snake2", "conv2")


class DacFamily(Family):
    """Family of DAC."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Dac(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        state: Any = read_state(path)
        if "state_dict" in state:  # a file of `descript-audio-codec`
            state = state["state_dict"]
            if not isinstance(state, dict):
                raise CheckpointError(f"{path}: state_dict: expected weights by name")
        own = {
            name: value
            for name, value in state.items()
            if str(name).startswith(_PARTS) and not _ENCODING.match(str(name))
        }
        blocks = len(network.decoder.block)
        named = floating_tensors(own, path, lambda name: _transformers_name(name, blocks))
        return fitting_weights(network, _converted(fold_weight_norm(named, path), path), path)


def _converted(published: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Converts published weights to weights of the network."""
    weights: dict[str, torch.Tensor] = {}
    books: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in published.items():
        if found := _CODEBOOK.fullmatch(name):
            books.setdefault(int(found[1]), {})[found[2]] = value
        else:
            weights[name] = flat_slopes(name, value)
    joined = stacked_projections(books, _BOOK, path)
    return weights | {f"quantizer.{name}": value for name, value in joined.items()}


def flat_slopes(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a weight, with the slopes (1, channels, 1) of an activation as (channels,)."""
    slopes = name.endswith(".alpha") and value.dim() == 3 and value.shape[::2] == (1, 1)
    return value.flatten() if slopes else value


def _transformers_name(name: str, blocks: int) -> str:
    """Returns the name of a weight in the format of `transformers`.

    Args:
        name: name in that format, or in that of `descript-audio-codec`.
        blocks: number of upsampling blocks.
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    number, place, inner, own = found.groups()
    layer, block = int(number), int(number) - 1
    if place is None:
        outside = {0: "conv1", blocks + 1: "snake1", blocks + 2: "conv2"}
        return f"decoder.{outside[layer]}.{own}" if layer in outside else name
    start = f"decoder.block.{block}"
    if inner is None:
        return f"{start}.{_IN_BLOCK[int(place)]}.{own}" if int(place) < len(_IN_BLOCK) else name
    unit = int(place) - len(_IN_BLOCK) + 1
    if int(inner) >= len(_IN_UNIT):
        return name
    return f"{start}.res_unit{unit}.{_IN_UNIT[int(inner)]}.{own}"


FAMILY = DacFamily()
