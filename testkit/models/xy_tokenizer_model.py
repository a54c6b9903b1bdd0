"""Folders of XY-Tokenizer with random weights, in the formats of its authors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.families.xy_tokenizer.config import YAML, XYTokenizerSizes
from token2wav.families.xy_tokenizer.family import XYTokenizerDecoder

# The published sizes of MOSS-TTSD 0.5
PUBLISHED: dict[str, Any] = {
    "input_sample_rate": 16000,
    "output_sample_rate": 32000,
    "encoder_downsample_rate": 1280,
    "decoder_upsample_rate": 2560,
    "semantic_encoder_kwargs": {"num_mel_bins": 80},
    "quantizer_kwargs": {
        "input_dim": 3072,
        "rvq_dim": 512,
        "output_dim": 3072,
        "num_quantizers": 8,
        "codebook_size": 1024,
        "codebook_dim": 512,
        "quantizer_dropout": 0.0,
        "commitment": 1,
    },
    "post_rvq_adapter_kwargs": {
        "input_dim": 3072,
        "output_dim": 3072,
        "d_model": 768,
        "max_source_positions": 375,
        "encoder_layers": 4,
        "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
    },
    "upsample_kwargs": {"d_model": 768, "stride": 4},
    "acoustic_decoder_kwargs": {
        "num_mel_bins": 80,
        "sampling_rate": 16000,
        "hop_length": 160,
        "stride_size": 2,
        "kernel_size": 3,
        "d_model": 768,
        "scale_embedding": False,
        "max_audio_seconds": 30,
        "decoder_layers": 12,
        "decoder_attention_heads": 12,
        "decoder_ffn_dim": 3072,
        "activation_function": "gelu",
    },
    "vocos_kwargs": {
        "input_channels": 80,
        "dim": 512,
        "intermediate_dim": 4096,
        "num_layers": 30,
        "n_fft": 1280,
        "hop_size": 320,
        "padding": "same",
    },
}


def document(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of the `config.json` of MOSS-TTSD's folder for `transformers`."""
    rate = sizes.get("output_sample_rate") or sizes["sample_rate"]
    return {"model_type": "xy_tokenizer", "sampling_rate": rate, "params": sizes}


def published_weights(sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Draws weights with the names of MOSS-TTSD's checkpoints, also some of the encoder."""
    with torch.device("meta"):
        network = XYTokenizerDecoder(YAML.read(XYTokenizerSizes, {"generator_params": sizes}))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in network.state_dict().items():
        part, _, rest = name.partition(".")
        if name == "quantizer.entries":
            for number in range(len(value)):
                book = f"quantizer.quantizers.{number}."
                shapes[f"{book}codebook"] = tuple(value.shape[1:])
        elif name == "output_proj.weight":
            shapes["quantizer.output_proj.weight_v"] = (*value.shape, 1)
            shapes["quantizer.output_proj.weight_g"] = (len(value), 1, 1)
        elif part == "output_proj":
            shapes[f"quantizer.{name}"] = tuple(value.shape)
        elif part == "upsample":
            shapes[f"upsample.up_conv.{rest}"] = tuple(value.shape)
        elif part == "vocos":
            place = "head" if rest.startswith("out.") else "backbone"
            shapes[f"enhanced_vocos.{place}.{rest}"] = tuple(value.shape)
        else:
            shapes[name.replace(".mlp.", ".")] = tuple(value.shape)
    weights = fill_state({name: torch.empty(shape) for name, shape in shapes.items()})
    unused = {
        "acoustic_decoder.positional_embedding": torch.zeros(3, 2),
        "enhanced_vocos.head.istft.window": torch.zeros(4),
        "quantizer.input_proj.bias": torch.zeros(2),
        "quantizer.quantizers.0.cluster_size": torch.zeros(2),
        "quantizer.quantizers.0.inited": torch.ones(1, dtype=torch.bool),
        "semantic_encoder.conv1.bias": torch.zeros(2),
    }
    return weights | unused


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes MOSS-TTSD's folder for `transformers`, and returns it. Its layers have `mlp`."""
    weights = {
        name.replace(".fc", ".mlp.fc"): value
        for name, value in published_weights(golden.sizes).items()
    }
    return write_pretrained(folder, document(golden.sizes), weights)


def write_authors(folder: Path, golden: FamilyGolden, vocos: str = "vocos.") -> Path:
    """Writes the YAML file and the checkpoint of the codec's authors, and returns the folder.

    Args:
        vocos: beginning of the names of Vocos. That of MOSS-TTSD is `enhanced_vocos.`.
    """
    weights = {
        name.replace("enhanced_vocos.", vocos): value
        for name, value in published_weights(golden.sizes).items()
    }
    torch.save({"generator": weights}, folder / "xy_tokenizer.ckpt")
    content = {"sample_rate": 16000, "generator_params": golden.sizes}
    (folder / "xy_tokenizer_config.yaml").write_text(yaml.safe_dump(content))
    return folder
