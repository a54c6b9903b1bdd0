"""Folders of LFM2-Audio's detokenizer with random weights, as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.families.lfm2_audio.config import FORMAT, Lfm2AudioSizes
from token2wav.families.lfm2_audio.family import Lfm2AudioDecoder

# The published sizes that differ from the defaults of `transformers`, by the weights of
# LiquidAI/LFM2.5-Audio-1.5B
PUBLISHED: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 3328,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": [
        *["conv", "conv", "sliding_attention"],
        *["conv", "sliding_attention"] * 2,
        "conv",
    ],
    "sliding_window": 30,
}


def document(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    return {"model_type": "lfm2", "vocab_size": 65536, "use_pos_enc": True, **sizes}


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the folder of the detokenizer, and returns it."""
    with torch.device("meta"):
        network = Lfm2AudioDecoder(FORMAT.read(Lfm2AudioSizes, document(golden.sizes)))
    shapes = {
        "emb.emb.weight" if name == "emb.weight" else name: value.shape
        for name, value in network.state_dict().items()
    }
    weights = fill_state({name: torch.empty(shape) for name, shape in shapes.items()})
    unused = {"lfm.embed_tokens.weight": torch.zeros(8, 2), "istft.window": torch.zeros(4)}
    return write_pretrained(folder, document(golden.sizes), weights | unused)
