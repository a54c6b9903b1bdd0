"""Folders of VibeVoice with random weights, in its three published formats."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.config.values import from_mapping
from token2wav.families.vibevoice.config import WEIGHT_PREFIXES, VibeVoiceSizes
from token2wav.families.vibevoice.family import VibeVoiceDecoder

Weights = dict[str, torch.Tensor]
# Beginning of the names of the decoder, scale of latents, and bias
MICROSOFT = (WEIGHT_PREFIXES[0], *WEIGHT_PREFIXES[3:5])
TRANSFORMERS = (WEIGHT_PREFIXES[1], *WEIGHT_PREFIXES[5:7])


def tokenizer_weights(golden: FamilyGolden) -> Weights:
    """Returns the weights of the decoder under the names of `transformers`."""
    with torch.device("meta"):
        network = VibeVoiceDecoder(from_mapping(VibeVoiceSizes, golden.sizes, ""))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in network.state_dict().items():
        if "factor" in name:
            continue
        layer, _, kind = name.rpartition(".")
        if match := re.fullmatch(r"upsample_layers\.(\d+)", layer):
            stage = int(match[1])
            layer = f"conv_layers.{stage - 1}.convtr.convtr" if stage else "stem.conv.conv"
        elif layer == "head" or layer.endswith(".mixer"):
            layer = f"{layer}.conv"
        if match := re.match(r"stages\.(\d+)\.", layer):
            stage = int(match[1])
            start = f"conv_layers.{stage - 1}.stage." if stage else "stem.stage."
            layer = start + layer[match.end() :]
        shapes[f"decoder.{layer}.{kind}"] = tuple(value.shape)
    return fill_state({name: torch.empty(shape) for name, shape in shapes.items()})


def write_tokenizer(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the folder of the acoustic tokenizer alone, and returns it."""
    weights = {**tokenizer_weights(golden), "encoder.stem.conv.conv.bias": torch.zeros(3)}
    document = {"model_type": "vibevoice_acoustic_tokenizer", **golden.sizes}
    return write_pretrained(folder, document, weights)


def write_transformers(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the folder of a whole model of `transformers`, with latents that are not scaled."""
    weights = {
        name.replace("decoder.", TRANSFORMERS[0], 1): value
        for name, value in tokenizer_weights(golden).items()
    }
    factors = dict(zip(TRANSFORMERS[1:], (torch.ones(()), torch.zeros(())), strict=True))
    document = {"model_type": "vibevoice", "audio_config": golden.sizes, "text_config": {}}
    return write_pretrained(folder, document, weights | factors)


def write_microsoft(
    folder: Path, golden: FamilyGolden, factors: tuple[float, float] = (1.0, 0.0)
) -> Path:
    """Writes the folder of a whole model in Microsoft's format, with weights in several files.

    Args:
        folder: folder to write.
        golden: golden set that gives the sizes.
        factors: scale and bias of latents.
    """
    sizes = from_mapping(VibeVoiceSizes, golden.sizes, "")
    section = {
        "vae_dim": sizes.hidden_size,
        "encoder_ratios": [1],
        "decoder_ratios": list(sizes.downsampling_ratios[::-1]),
        "encoder_depths": "-".join(map(str, sizes.depths)),
        "decoder_depths": None,
        "encoder_n_filters": 99,
        "decoder_n_filters": sizes.num_filters,
        "layernorm_eps": sizes.rms_norm_eps,
        "mixer_layer": "depthwise_conv",
    }
    weights: Weights = {}
    for name, value in tokenizer_weights(golden).items():
        name = name.removeprefix("decoder.").replace(".mixer.conv.", ".mixer.conv.conv.conv.")
        name = name.replace("head.conv.", "head.conv.conv.")
        name = name.replace("stem.conv.conv.", "upsample_layers.0.0.conv.conv.")
        name = name.replace("stem.stage.", "stages.0.")
        if match := re.match(r"conv_layers\.(\d+)\.(stage\.|convtr)", name):
            stage, rest = int(match[1]) + 1, name[match.end() :]
            name = (
                f"stages.{stage}.{rest}"
                if match[2] == "stage."
                else f"upsample_layers.{stage}.0.convtr{rest}"
            )
        weights[MICROSOFT[0] + name] = value
    half = len(weights) // 2
    shards: list[Weights] = [
        {"model.language_model.norm.weight": torch.ones(4)},
        dict(list(weights.items())[:half]),
        dict(list(weights.items())[half:])
        | dict(zip(MICROSOFT[1:], map(torch.tensor, factors), strict=True)),
    ]
    document = {"model_type": "vibevoice_streaming", "acoustic_tokenizer_config": section}
    return write_pretrained(folder, document, *shards)
