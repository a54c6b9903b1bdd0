"""Folders of the causal DAC with random weights, as Audio8 and Fish Audio publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from testkit.models.random_weights import fill_dac
from token2wav.config.values import from_mapping, known_fields
from token2wav.families.causal_dac.config import CausalDacSizes

# Sizes in the `config.json` of Audio8-TTS-Preview
AUDIO8 = {
    "num_codebooks": 10,
    "codebook_size": 4096,
    "codec_sample_rate": 44_100,
    "codec_frame_size": 2048,
    "codec_post_n_layer": 8,
    "codec_post_n_head": 16,
    "codec_post_n_local_heads": 8,
    "codec_post_intermediate_size": 1216,
}
Weights = dict[str, torch.Tensor]
_TABLES = {  # in the files of Fish Audio
    "quantizer.post_module.freqs_cis": torch.ones(4, 2, 2, dtype=torch.bfloat16),
    "quantizer.post_module.causal_mask": torch.ones(4, 4, dtype=torch.bool),
}


def write_audio8(folder: Path, golden: Any) -> Path:
    """Writes a folder of Audio8, and returns it."""
    return _written(folder, {"model_type": "arktts", **golden.sizes}, weights(golden.sizes))


def write_fish(folder: Path, golden: Any) -> Path:
    """Writes a folder of Fish Audio's S2-Pro, and returns it."""
    return _written(
        folder,
        {"model_type": "fish_qwen3_omni", "text_config": {"dim": 2560}, **golden.sizes},
        {"generator": weights(golden.sizes) | _TABLES},
    )


def write_fish_s1(folder: Path, golden: Any) -> Path:
    """Writes a folder of Fish Audio's S1, whose weights have longer names, and returns it."""
    state = weights(golden.sizes) | _TABLES
    state = {f"generator.{name}": value for name, value in state.items()}
    discriminator = {"discriminator.model.0.weight": torch.ones(3)}
    document = {"model_type": "dual_ar", "dim": 1024, "n_layer": 28, **golden.sizes}
    return _written(folder, document, {"state_dict": state | discriminator})


def weights(published: dict[str, Any]) -> Weights:
    """Returns the weights of a decoder, and some of an encoder, under their published names."""
    sizes = from_mapping(CausalDacSizes, known_fields(CausalDacSizes, published), "")
    width, dim = sizes.codec_latent_dim, sizes.codec_codebook_dim
    shapes: dict[str, tuple[int, ...]] = {"encoder.block.0.conv.bias": (3,)}

    def conv(name: str, *shape: int, normed: bool = True, outputs: int | None = None) -> None:
        """Adds a convolution, whose weight has a norm."""
        start = f"{name}.parametrizations.weight.original"
        if normed:
            shapes.update({f"{start}0": (shape[0], 1, 1), f"{start}1": shape})
        else:
            shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = (outputs or shape[0],)

    residual = [sizes.codec_residual_codebook_size] * (sizes.num_codebooks - 1)
    for kind, entries in (("semantic_quantizer", [sizes.codebook_size]), ("quantizer", residual)):
        for number, count in enumerate(entries):
            book = f"quantizer.{kind}.quantizers.{number}"
            shapes[f"{book}.codebook.weight"] = (count, dim)
            for name, (outputs, inputs) in {"in": (dim, width), "out": (width, dim)}.items():
                shapes[f"{book}.{name}_proj.weight_g"] = (outputs, 1, 1)
                shapes[f"{book}.{name}_proj.weight_v"] = (outputs, inputs, 1)
                shapes[f"{book}.{name}_proj.bias"] = (outputs,)
    inner, head = sizes.codec_post_intermediate_size, sizes.codec_head_dim
    heads = sizes.codec_post_n_head
    for layer in range(sizes.codec_post_n_layer):
        start = f"quantizer.post_module.layers.{layer}"
        rows = (heads + 2 * sizes.codec_post_n_local_heads) * head
        shapes |= {
            f"{start}.attention.wqkv.weight": (rows, width),
            f"{start}.attention.wo.weight": (width, heads * head),
            f"{start}.feed_forward.w1.weight": (inner, width),
            f"{start}.feed_forward.w3.weight": (inner, width),
            f"{start}.feed_forward.w2.weight": (width, inner),
        }
        for part in ("attention", "ffn"):
            shapes[f"{start}.{part}_norm.weight"] = (width,)
            shapes[f"{start}.{part}_layer_scale.gamma"] = (width,)
    shapes["quantizer.post_module.norm.weight"] = (width,)
    shapes["quantizer.pre_module.norm.weight"] = (width,)  # makes codes
    for number, factor in enumerate(sizes.codec_downsample_factor[::-1]):
        start = f"quantizer.upsample.{number}"
        conv(f"{start}.0.conv", width, width, factor, normed=False)
        conv(f"{start}.1.dwconv.conv", width, 1, 7, normed=False)
        shapes |= {f"{start}.1.{name}": (width,) for name in ("gamma", "norm.weight", "norm.bias")}
        for name, linear in {
            "pwconv1": nn.Linear(width, 4 * width, device="meta"),
            "pwconv2": nn.Linear(4 * width, width, device="meta"),
        }.items():
            shapes |= {f"{start}.1.{name}.{key}": v.shape for key, v in linear.state_dict().items()}
    channels, rates = sizes.codec_decoder_dim, sizes.codec_decoder_rates
    conv("decoder.model.0.conv", channels, width, 7)
    for number, rate in enumerate(rates, 1):
        block, half = f"decoder.model.{number}.block", channels // 2
        shapes[f"{block}.0.alpha"] = (1, channels, 1)
        conv(f"{block}.1.conv", channels, half, 2 * rate, outputs=half)
        for unit in (2, 3, 4):
            for activation, kernel in ((0, 7), (2, 1)):
                shapes[f"{block}.{unit}.block.{activation}.alpha"] = (1, half, 1)
                conv(f"{block}.{unit}.block.{activation + 1}.conv", half, half, kernel)
        channels = half
    shapes[f"decoder.model.{len(rates) + 1}.alpha"] = (1, channels, 1)
    conv(f"decoder.model.{len(rates) + 2}.conv", 1, channels, 7)
    return fill_dac({name: torch.empty(shape) for name, shape in shapes.items()})


def _written(folder: Path, document: dict[str, Any], state: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(document))
    torch.save(state, folder / "codec.pth")
    return folder
