"""Folders of the MOSS Audio Tokenizer with random weights, under their published names.

A folder with two channels has the names of version 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained

_NORM = ("parametrizations.weight.original0", "parametrizations.weight.original1")


def document(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    codes = {"quantizer_type": "rlfq", **sizes["quantizer_kwargs"]}
    return {
        "model_type": "moss-audio-tokenizer",
        "sampling_rate": 24000,
        "downsample_rate": 1920,
        "number_channels": None,
        "encoder_kwargs": [],  # not read
        **sizes,
        "quantizer_kwargs": codes,
    }


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model folder, and returns it."""
    content = document(golden.sizes)
    return write_pretrained(folder, content, published_weights(content))


def published_weights(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns weights under the published names, for the content of `config.json`."""
    codes = content["quantizer_kwargs"]
    width = codes["rvq_dim"]
    shapes: dict[str, tuple[int, ...]] = {"encoder.1.output_proj.weight": (3, 3)}  # not read
    shapes |= _convolution("quantizer.output_proj", width, codes["output_dim"])
    shapes |= _convolution("quantizer.input_proj", codes["input_dim"], width)  # not read
    for number in range(codes["num_quantizers"]):
        book = f"quantizer.quantizers.{number}"
        shapes[f"{book}.codebook.weight"] = (codes["codebook_size"], codes["codebook_dim"])
        shapes |= _convolution(f"{book}.out_proj", codes["codebook_dim"], width)
        shapes |= _convolution(f"{book}.in_proj", width, codes["codebook_dim"])  # not read
    for index, part in enumerate(content["decoder_kwargs"]):
        if part["module_type"] == "Transformer":
            shapes |= _transformer(f"decoder.{index}", part, content["number_channels"] == 2)
    return fill_state({name: torch.empty(shape) for name, shape in shapes.items()})


def _convolution(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a convolution with a kernel of 1 and a weight norm."""
    return {
        f"{name}.bias": (outputs,),
        f"{name}.{_NORM[0]}": (outputs, 1, 1),
        f"{name}.{_NORM[1]}": (outputs, inputs, 1),
    }


def _transformer(start: str, part: dict[str, Any], version_2: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a transformer of version 1 or of version 2, which has a projection even
    between equal numbers of channels.
    """
    width, inner = part["d_model"], part["dim_feedforward"]
    shapes: dict[str, tuple[int, ...]] = {}
    if version_2 or part["input_dimension"] != width:
        shapes[f"{start}.input_proj.weight"] = (width, part["input_dimension"])
    if version_2 or part["output_dimension"] != width:
        shapes[f"{start}.output_proj.weight"] = (part["output_dimension"], width)
    rows, out, first, last = (
        ("self_attn.in_proj", "self_attn.out_proj", "ffn.0", "ffn.2")
        if version_2
        else ("self_attn.in_projs.0", "self_attn.out_projs.0", "linear1", "linear2")
    )
    for number in range(part["num_layers"]):
        layer = f"{start}.transformer.layers.{number}"
        shapes |= {
            f"{layer}.{rows}.weight": (3 * width, width),
            f"{layer}.{out}.weight": (width, width),
            f"{layer}.{first}.weight": (inner, width),
            f"{layer}.{last}.weight": (width, inner),
        }
        for parameter in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            shapes[f"{layer}.{parameter}"] = (width,)
        for parameter in ("layer_scale_1.scale", "layer_scale_2.scale"):
            shapes[f"{layer}.{parameter}"] = (width,)
    return shapes
