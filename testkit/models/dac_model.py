"""Folders of DAC models, and of Higgs Audio tokenizers, with random weights, as `transformers` and
`descript-audio-codec` write them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_dac
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.combine import Residual
from token2wav.layers.snake import Snake
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.published.registry import read_config, unfilled_network

_MODEL_TYPES = {"dac": "dac", "higgs": "higgs_audio_v2_tokenizer"}
WEIGHT_NORM = (".weight_g", ".weight_v")
_UNIT_LAYERS = {"snake1": 0, "conv1": 1, "snake2": 2, "conv2": 3}
Shapes = dict[str, tuple[int, ...]]


def document(sizes: dict[str, Any], family: str = "dac") -> dict[str, Any]:
    """Returns the content of `config.json`."""
    return {"model_type": _MODEL_TYPES[family], "initializer_range": 0.02, **sizes}


def write_dac(folder: Path, golden: Any) -> Path:
    """Writes a folder of `transformers` with DAC, and returns it."""
    return _write_transformers(folder, golden.sizes, "dac")


def write_higgs(folder: Path, golden: Any) -> Path:
    """Writes a folder of `transformers` with a Higgs Audio tokenizer, and returns it."""
    return _write_transformers(folder, golden.sizes, "higgs")


def write_higgs_first_release(folder: Path, golden: Any) -> Path:
    """Writes a folder of the first release of the Higgs Audio tokenizer, and returns it."""
    (folder / "config.json").write_text(json.dumps(golden.sizes))
    torch.save(first_release_weights(folder), folder / "model.pth")
    return folder


def first_release_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns weights of the first release of the Higgs Audio tokenizer, for the `config.json` of a
    folder. The decoder has a weight norm.
    """
    network = unfilled_network(read_config(folder), "decoder")
    names = ("_codebook.embed", "project_out", "project_in")
    shapes = numbered_shapes(network, ["conv1"], ["snake1", "conv_t1"], WEIGHT_NORM, names)
    renamed = {
        name.replace("quantizer.quantizers.", "quantizer.vq.layers.")
        .replace("fc2.", "fc_post2.")
        .replace("acoustic_decoder.", "decoder_2."): value
        for name, value in shapes.items()
    }
    return fill_dac(renamed)


def write_descript(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a folder of `descript-audio-codec`, and returns it."""
    torch.save(descript_content(folder, golden.sizes), folder / "weights.pth")
    return folder


def _write_transformers(folder: Path, sizes: dict[str, Any], family: str) -> Path:
    (folder / "config.json").write_text(json.dumps(document(sizes, family)))
    save_file(published_weights(folder, family), folder / "model.safetensors")
    return folder


def published_weights(folder: Path, family: str = "dac") -> dict[str, torch.Tensor]:
    """Returns weights under the names of `transformers`, for the `config.json` of a folder."""
    network = unfilled_network(read_config(folder), "decoder")
    names = {
        "dac": ("codebook.weight", "out_proj", "in_proj"),
        "higgs": ("codebook.embed", "project_out", "project_in"),
    }[family]
    shapes: Shapes = {"encoder.conv1.bias": (3,)}  # not read
    for path, module in network.named_modules():
        if isinstance(module, ProjectedCodebooks):
            shapes |= _codebooks(module, *names)
        elif not isinstance(module, Snake):
            for name, value in module.named_parameters(prefix=path, recurse=False):
                shapes[name] = tuple(value.shape)
        else:
            shapes[f"{path}.alpha"] = (1, len(module.alpha), 1)
    return fill_dac({name: torch.empty(shape) for name, shape in shapes.items()})


def _codebooks(module: ProjectedCodebooks, entries: str, outward: str, inward: str) -> Shapes:
    count, size, dim = module.entries.shape
    width = module.bias.shape[1]
    end = (1,) if outward == "out_proj" else ()  # the projections of DAC are convolutions
    shapes: Shapes = {}
    for number in range(count):
        start = f"quantizer.quantizers.{number}"
        shapes[f"{start}.{entries}"] = (size, dim)
        shapes[f"{start}.{outward}.weight"] = (width, dim, *end)
        shapes[f"{start}.{outward}.bias"] = (width,)
        shapes[f"{start}.{inward}.weight"] = (dim, width, *end)  # not read
    return shapes


def descript_content(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `weights.pth`, with a weight norm.

    Args:
        folder: folder without any model.
    """
    metadata = {"kwargs": {**sizes, "quantizer_dropout": 0.5}}
    path = folder / "weights.pth"
    torch.save({"metadata": metadata}, path)
    network = unfilled_network(read_config(folder), "decoder")
    path.unlink()
    state = fill_dac(numbered_shapes(network, ["conv1"], ["snake1", "conv_t1"], WEIGHT_NORM))
    return {"state_dict": state, "metadata": metadata}


def numbered_shapes(
    network: Any,
    first: list[str],
    in_block: list[str],
    norm: tuple[str, str],
    book: tuple[str, str, str] = ("codebook.weight", "out_proj", "in_proj"),
) -> dict[str, torch.Tensor]:
    """Returns empty weights under the names of packages that number the layers of the decoder.

    Args:
        network: network with `ProjectedCodebooks` and `SymmetricDecoder`.
        first: layers before the blocks.
        in_block: layers of a block before its residual units.
        norm: endings of the two tensors of a weight norm.
        book: names of the entries of a codebook, and of the projections from and to them.
    """
    units = {path for path, module in network.named_modules() if isinstance(module, Residual)}
    [decoder] = [module for module in network.modules() if isinstance(module, SymmetricDecoder)]
    blocks: Any = decoder.block
    layers = [*first, *["block"] * len(blocks), "snake1", "conv2"]
    shapes: Shapes = {"encoder.block.0.bias": (3,)}  # not read
    for path_of, module in network.named_modules():
        if isinstance(module, ProjectedCodebooks):
            module_shapes = _codebooks(module, *book)
        elif isinstance(module, Snake):
            module_shapes = {f"{path_of}.alpha": (1, len(module.alpha), 1)}
        else:
            module_shapes = {
                name: tuple(value.shape)
                for name, value in module.named_parameters(prefix=path_of, recurse=False)
            }
        for name, shape in module_shapes.items():
            name = _numbered_name(name, units, layers, in_block)
            stem = name.removesuffix(".weight")
            if stem != name and len(shape) == 3:
                shapes[stem + norm[0]], shapes[stem + norm[1]] = (shape[0], 1, 1), shape
            else:
                shapes[name] = shape
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def _numbered_name(name: str, units: set[str], layers: list[str], in_block: list[str]) -> str:
    parts = name.split(".")
    if not parts[0].endswith("decoder"):
        return name
    if parts[1] != "block":
        return f"{parts[0]}.model.{layers.index(parts[1])}.{'.'.join(parts[2:])}"
    start = f"{parts[0]}.model.{layers.index('block') + int(parts[2])}.block"
    if ".".join(parts[:4]) in units:
        unit = int(parts[3].removeprefix("res_unit")) + len(in_block) - 1
        return f"{start}.{unit}.block.{_UNIT_LAYERS[parts[4]]}.{parts[5]}"
    return f"{start}.{in_block.index(parts[3])}.{'.'.join(parts[4:])}"
