"""Folders of the codec of Pocket TTS with random weights, as `transformers` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.config.values import from_mapping
from token2wav.families.pocket_tts.config import PocketSizes
from token2wav.families.pocket_tts.family import PocketDecoder


def published_weights(golden: FamilyGolden) -> dict[str, torch.Tensor]:
    """Returns the weights under their published names."""
    with torch.device("meta"):
        network = PocketDecoder(from_mapping(PocketSizes, golden.sizes, ""))
    shapes: dict[str, tuple[int, ...]] = {"encoder.layers.0.conv.bias": (3,)}  # not read
    for name, value in network.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if name.startswith("decoder."):
            name = f"decoder.decoder_seanet.{layer.removeprefix('decoder.')}.conv.{kind}"
        elif layer == "upsample":
            name = f"decoder.upsample.conv.{kind}"
        elif layer != "latent_proj":
            name = f"decoder.{name}"
        shapes[name] = tuple(value.shape)
    return fill_state({name: torch.empty(shape) for name, shape in shapes.items()})


def document(golden: FamilyGolden) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    return {
        "model_type": "pocket_tts_audio_tokenizer",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **golden.sizes,
    }


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model folder, and returns it."""
    return write_pretrained(folder, document(golden), published_weights(golden))
