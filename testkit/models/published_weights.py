"""Random weights of a codec under their published names.

The network says which weights there are, and a `Naming` what the authors call them. Readers have a
table for the other direction, in `token2wav/families`. Golden tensors check both tables: the public
code got its weights by the same names (`random_weights.py`), so a wrong name gives other audio than
`tests/data/families/NAME/*.safetensors` has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from token2wav.layers.codebooks import Codebooks
from token2wav.layers.combine import Residual
from token2wav.layers.convolutions import StreamConv, StreamConvTranspose
from token2wav.networks.symmetric_decoder import SymmetricDecoder

Shape = tuple[int, ...]
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
Norm = tuple[str, str]
OLD_NORM = (".weight_g", ".weight_v")
NORM = (".parametrizations.weight.original0", ".parametrizations.weight.original1")


@dataclass(frozen=True)
class Naming:
    """Names and shapes of the weights of a codec in its published files.

    Attributes:
        rules: regular expressions and their replacements, in this order. They turn a name of
            `_network_weights` into the published name.
        shapes: regular expressions of published names, each with the function that turns the shape
            in the network into the published one. Its second argument are the sizes of the codec.
        normed: regular expressions of published names of convolutions with a weight norm, each with
            the endings of its two tensors.
        joined: whether queries, keys and values have one matrix.
        numbered: whether the layers of a `SymmetricDecoder` have numbers instead of names.
    """

    rules: Rules = ()
    shapes: tuple[tuple[str, Callable[[Shape, Any], Shape]], ...] = ()
    normed: tuple[tuple[str, Norm], ...] = ()
    joined: bool = False
    numbered: bool = False

    def weights(self, network: nn.Module, sizes: Any) -> dict[str, torch.Tensor]:
        """Returns the weights of a network without values."""
        weights: dict[str, torch.Tensor] = {}
        for name, shape in self._network_weights(network):
            name = re.sub(r"~\w+", "", renamed(name, self.rules))
            for pattern, change in self.shapes:
                if re.search(pattern, name):
                    shape = change(shape, sizes)
            norms = [norm for pattern, norm in self.normed if re.search(pattern, name)]
            if norms and len(shape) == 3 and name.endswith(".weight"):
                gain, direction = (name.removesuffix(".weight") + end for end in norms[0])
                weights |= {gain: torch.empty(shape[0], 1, 1), direction: torch.empty(shape)}
            else:
                weights[name] = torch.empty(shape)
        return weights

    def _network_weights(self, network: nn.Module) -> Iterator[tuple[str, Shape]]:
        """Yields names and shapes of the weights of a network.

        The weight of a convolution is `NAME~conv.weight`, or `NAME~convtr.weight` if it is
        transposed. Codebook 3 has the name `NAME~3`.
        """
        numbers = numbered_layers(network) if self.numbered else {}
        for path, module in network.named_modules():
            for own, published in numbers.items():
                if path == own or path.startswith(f"{own}."):
                    path = published + path.removeprefix(own)
                    break
            shapes = {  # without single numbers, which are settings
                name: tuple(value.shape)
                for name, value in module.named_parameters(recurse=False)
                if value.dim()
            }
            if "entries" in shapes:
                yield from _codebooks(path, module, shapes)
            elif self.joined and hasattr(module, "q_proj"):
                parts = [getattr(module, f"{part}_proj").weight for part in "qkv"]
                yield f"{path}.qkv_proj.weight", (sum(map(len, parts)), parts[0].shape[1])
            elif not (self.joined and re.search(r"\.[qkv]_proj$", path)):
                transposed = isinstance(module, StreamConvTranspose)
                wrapper = "~convtr" if transposed else "~conv" * isinstance(module, StreamConv)
                yield from ((f"{path}{wrapper}.{name}", shape) for name, shape in shapes.items())


def renamed(name: str, rules: Rules) -> str:
    """Returns a name after all rules."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def numbered_layers(network: nn.Module) -> dict[str, str]:
    """Returns the published name of every layer of a `SymmetricDecoder` in packages that number the
    layers, by its name in the network.
    """
    [(path, decoder)] = [
        (path, module)
        for path, module in network.named_modules()
        if isinstance(module, SymmetricDecoder)
    ]
    names, number = dict[str, str](), 0
    for child, layer in decoder.named_children():
        if child != "block":
            names[f"{path}.{child}"] = f"{path}.model.{number}"
            number += 1
            continue
        for index, block in layer.named_children():
            start, inner = f"{path}.model.{number}.block", 0
            for part, module in block.named_children():
                own = f"{path}.block.{index}.{part}"
                if part == "scale":
                    names[own] = f"{path}.sr_cond_model.{number}"
                    continue
                names[own] = f"{start}.{inner}"
                if isinstance(module, Residual):
                    del names[own]
                    for unit, kind in enumerate(("snake1", "conv1", "snake2", "conv2")):
                        names[f"{own}.{kind}"] = f"{start}.{inner}.block.{unit}"
                inner += 1
            number += 1
    return names


def _codebooks(path: str, module: nn.Module, shapes: dict[str, Shape]) -> Iterator[Any]:
    """Yields the weights of each codebook: of its entries alone, or with projections to and from
    them, or with the uses of each entry in the training.
    """
    count, size, dim = shapes["entries"]
    for number in range(count):
        book = f"{path}~{number}"
        yield f"{book}.entries", (size, dim)
        if "bias" in shapes:
            width = shapes["bias"][1]
            yield from {
                f"{book}.out.weight": (width, dim),
                f"{book}.out.bias": (width,),
                f"{book}.in.weight": (dim, width),
                f"{book}.in.bias": (dim,),
            }.items()
        if isinstance(module, Codebooks):
            yield from {f"{book}.uses": (size,), f"{book}.initialized": (1,)}.items()
    if isinstance(module, Codebooks) and module.output_proj is not None:
        yield f"{path}.input_proj.weight", tuple(module.output_proj.weight.T.shape)
