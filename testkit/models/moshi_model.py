"""Folders of `moshi` with random weights of Mimi, as Kyutai publishes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from token2wav.families.mimi.config import MOSHI, MimiSizes
from token2wav.families.mimi.family import Mimi
from token2wav.layers.codebooks import Codebooks
from token2wav.layers.streaming import StreamConv, StreamConvTranspose
from token2wav.layers.window_transformer import TransformerLayer

WEIGHTS = "tokenizer-0123abcd-checkpoint125.safetensors"
SIZES = "mimi_config.json"

_LAYER = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "self_attn.out_projs.0",
    "mlp.fc1": "linear1",
    "mlp.fc2": "linear2",
    "self_attn_layer_scale": "layer_scale_1",
    "mlp_layer_scale": "layer_scale_2",
}


def published_weights(golden: FamilyGolden) -> dict[str, torch.Tensor]:
    """Returns the weights under the names that version 0.2.13 of the package saves."""
    with torch.device("meta"):
        network = Mimi(MOSHI.read(MimiSizes, golden.sizes))
    shapes: dict[str, tuple[int, ...]] = {"encoder.model.0.conv.conv.bias": (3,)}  # not read
    for path, module in network.named_modules():
        if isinstance(module, Codebooks):
            kind = {"semantic": "first", "acoustic": "rest"}[path.rpartition(".")[2]]
            part = f"quantizer.rvq_{kind}"
            for number, book in enumerate(module.entries):
                start = f"{part}.vq.layers.{number}._codebook"
                shapes[f"{start}._initialized"] = (1,)
                shapes[f"{start}.cluster_usage"] = tuple(book.shape[:1])
                shapes[f"{start}.embedding_sum"] = tuple(book.shape)
            assert module.output_proj is not None
            shapes[f"{part}.output_proj.weight"] = (*module.output_proj.weight.shape, 1)
            shapes[f"{part}.input_proj.weight"] = (*module.output_proj.weight.T.shape, 1)
        elif isinstance(module, (StreamConv, StreamConvTranspose)):
            wrapper = "convtr" if isinstance(module, StreamConvTranspose) else "conv"
            layer = path.replace("decoder.layers.", "decoder.model.")
            layer += ".convtr" * (path == "upsample") + f".{wrapper}.{wrapper}"
            for name, value in module.named_parameters():
                shapes[f"{layer}.{name}"] = tuple(value.shape)
        elif isinstance(module, TransformerLayer):
            layer = path.replace("decoder_transformer.", "decoder_transformer.transformer.")
            width = module.self_attn.q_proj.weight.shape[1]
            shapes[f"{layer}.self_attn.in_projs.0.weight"] = (3 * width, width)
            for name, value in module.named_parameters():
                inner, _, kind_of = name.rpartition(".")
                if inner in _LAYER:
                    shapes[f"{layer}.{_LAYER[inner]}.{kind_of}"] = tuple(value.shape)
    return fill_state({name: torch.empty(shape) for name, shape in shapes.items()})


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model folder, and returns it."""
    document = {"model_type": "moshi", "mimi_name": WEIGHTS, "mimi_config_name": SIZES, "dim": 4096}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / SIZES).write_text(json.dumps(golden.sizes))
    save_file(published_weights(golden), folder / WEIGHTS)
    return folder


def write_older_names(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model folder whose projections have their older names, and returns it."""
    write_model(folder, golden)
    older = {
        name.replace("in_projs.0.weight", "in_proj_weight").replace("out_projs.0.", "out_proj."): (
            value
        )
        for name, value in published_weights(golden).items()
    }
    save_file(older, folder / WEIGHTS)
    return folder
