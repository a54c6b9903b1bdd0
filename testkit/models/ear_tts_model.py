"""Folders of a NeMo model with EAR-TTS's codec, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.config.values import from_mapping
from token2wav.families.ear_tts.config import PREFIX, EarTtsSizes
from token2wav.families.ear_tts.family import EarTtsDecoder

PUBLISHED = {
    "sample_rate": 22050,
    "latent_size": 512,
    "n_fft": 16,
    "hop_length": 4,
    "base_hidden_size": 384,
    "channel_mult": [1, 2, 4],
    "rates": [7, 7, 9],
    "num_blocks": 3,
    "kernel_size": 7,
    "groups": 1,
    "codebook_size": 1024,
    "num_quantizers": 31,
    "wav_to_token_ratio": 1764,
}


def published_weights(golden: FamilyGolden) -> dict[str, torch.Tensor]:
    """Returns the weights under their published names."""
    with torch.device("meta"):
        network = EarTtsDecoder(from_mapping(EarTtsSizes, codec_config(golden), ""))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in network.state_dict().items():
        shape = tuple(value.shape)
        if name == "codebooks.entries":
            shapes |= {f"prvq.mus_list.{number}": shape[1:] for number in range(shape[0])}
        else:
            pointwise = ".pwconv" in name and name.endswith("weight")
            shapes[f"decoder.{name}"] = (*shape, 1) if pointwise else shape
    weights = fill_state({name: torch.empty(shape) for name, shape in shapes.items()})
    return {f"{PREFIX}{name}": value for name, value in weights.items()}


def codec_config(golden: Any) -> dict[str, Any]:
    return {name: value for name, value in golden.sizes.items() if name != "sample_rate"}


def document(golden: Any) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    return {
        "data": {"source_sample_rate": 16000},
        "model": {
            "stt": {"model": {"perception": {}}},
            "speech_generation": {
                "data": {"target_sample_rate": golden.sizes["sample_rate"]},
                "model": {"tts_config": {}, "codec_config": codec_config(golden)},
            },
        },
    }


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model folder, and returns it."""
    unread = {
        f"{PREFIX}encoder.layers.0.weight": torch.ones(3),
        f"{PREFIX}prvq._variance_list.0.variance": torch.ones(()),
        "tts_model.tts_model.embed.weight": torch.ones(3),
    }
    return write_pretrained(folder, document(golden), published_weights(golden) | unread)
