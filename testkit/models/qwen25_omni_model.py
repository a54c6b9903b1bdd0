"""Folders of Qwen2.5-Omni with random weights: a whole model, of which only the decoder is real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_omni
from testkit.models.shards import write_pretrained
from token2wav import Voice
from token2wav.families.qwen25_omni import PREFIXES, Qwen25OmniConfig, read
from token2wav.families.qwen25_omni.family import FAMILY
from token2wav.families.qwen25_omni.voices import named_voices

Weights = dict[str, torch.Tensor]
SPEAKERS = ("Chelsie", "Ethan")  # the first one is the speaker of the golden set


def published_name(name: str) -> str:
    """Returns the name of `transformers` for a weight of the flow."""
    if name == "input_embedding.weight":
        return "text_embed.codec_embed.weight"
    if name.startswith("spk_encoder."):
        return f"input_embed.{name}"
    name = name.removeprefix("decoder.estimator.")
    return name.replace(".ff.ff.2.", ".ff.ff.3.").replace(".ff.ff.0.0.", ".ff.ff.0.")


def published_weights(config: Qwen25OmniConfig) -> Weights:
    """Returns the weights of the decoder under the names of `transformers`."""
    shapes: dict[str, torch.Size] = {}
    for stage, prefix in PREFIXES.items():
        with torch.device("meta"):
            network = FAMILY.network(config, stage)
        for name, value in network.state_dict().items():
            if not name.endswith(("inv_freq", "filter")):
                current = published_name(name) if stage == "flow" else name
                shapes[prefix + current] = value.shape
    return fill_omni({name: torch.empty(shape) for name, shape in shapes.items()})


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the folder of a whole model, with weights in several files, and returns it."""
    document = {
        "model_type": "qwen2_5_omni",
        "token2wav_config": {"model_type": "qwen2_5_omni_token2wav", **golden.sizes},
        "talker_config": {},
    }
    (folder / "config.json").write_text(json.dumps(document))
    weights = published_weights(read(folder))
    half = len(weights) // 2
    shards: list[Weights] = [
        {"thinker.lm_head.weight": torch.ones(4)},
        dict(list(weights.items())[:half]),
        # older files have these tensors too
        dict(list(weights.items())[half:])
        | {PREFIXES["flow"] + "rotary_embed.inv_freq": torch.ones(3)},
    ]
    torch.save(speakers(golden), folder / "spk_dict.pt")
    return write_pretrained(folder, document, *shards)


def speakers(golden: FamilyGolden) -> dict[str, dict[str, Any]]:
    """Returns the content of `spk_dict.pt`."""
    first = {"cond": golden["cond"], "ref_mel": golden["ref_mel"], "bos_token": 3}
    cond, mel = torch.flip(golden["cond"], (1,)), torch.flip(golden["ref_mel"], (1,))
    return dict(zip(SPEAKERS, (first, {"cond": cond, "ref_mel": mel, "bos_token": 5}), strict=True))


def a_voice(folder: Path, name: str = SPEAKERS[0]) -> Voice:
    return named_voices(folder)[name]
