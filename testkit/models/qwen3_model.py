"""Folders of Qwen3-TTS's tokenizer and of Qwen3-Omni with random weights, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_qwen3
from testkit.models.shards import write_pretrained
from token2wav.config.values import from_mapping
from token2wav.families.qwen3.config import DecoderSizes
from token2wav.families.qwen3.network import Qwen3Decoder
from token2wav.layers.codebooks import Codebooks
from token2wav.layers.streaming import StreamConv, StreamConvTranspose

_KINDS = {"semantic": "first", "acoustic": "rest"}


def is_omni(golden: FamilyGolden) -> bool:
    return "codebook_dim" not in golden.sizes


def published_weights(golden: FamilyGolden) -> dict[str, torch.Tensor]:
    """Returns the weights under their published names, and some of other parts of the model."""
    with torch.device("meta"):
        network = Qwen3Decoder(from_mapping(DecoderSizes, golden.sizes, ""))
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in network.named_modules():
        layer = path.removeprefix("front.").replace(".window.layers.", ".layers.")
        if isinstance(module, Codebooks):
            part = f"quantizer.rvq_{_KINDS[layer.rpartition('.')[2]]}"
            for number, book in enumerate(module.entries):
                start = f"{part}.vq.layers.{number}._codebook"
                shapes[f"{start}.cluster_usage"] = tuple(book.shape[:1])
                shapes[f"{start}.embedding_sum"] = tuple(book.shape)
            assert module.output_proj is not None
            shapes[f"{part}.output_proj.weight"] = (*module.output_proj.weight.shape, 1)
            shapes[f"{part}.input_proj.weight"] = (*module.output_proj.weight.T.shape, 1)
        elif not path.startswith("front.quantizer"):
            wrapper = ".conv" if isinstance(module, (StreamConv, StreamConvTranspose)) else ""
            for name, value in module.named_parameters(recurse=False):
                shapes[f"{layer}{wrapper}.{name}"] = tuple(value.shape)
    weights = fill_qwen3({name: torch.empty(shape) for name, shape in shapes.items()})
    prefix = "code2wav." if is_omni(golden) else "decoder."
    unread = "talker.codec_head.weight" if is_omni(golden) else "encoder.layers.0.weight"
    return {**{prefix + name: value for name, value in weights.items()}, unread: torch.ones(3)}


def document(golden: FamilyGolden) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    if is_omni(golden):
        theta = golden.sizes.get("rope_theta", 10000.0)
        rope = {"rope_type": "default", "rope_theta": theta}
        section = {**golden.sizes, "rope_parameters": rope, "attention_dropout": 0.0}
        return {"model_type": "qwen3_omni_moe", "code2wav_config": section, "talker_config": {}}
    return {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "decoder_config": {**golden.sizes, "layer_scale_initial_scale": 0.01},
        "encoder_config": {"hidden_size": 1},
        "output_sample_rate": 24000,
    }


def write_model(folder: Path, golden: FamilyGolden, files: int = 1) -> Path:
    """Writes a model folder, and returns it.

    Args:
        files: files of the weights; an index names them if there are several.
    """
    weights = list(published_weights(golden).items())
    shards = [dict(weights[number::files]) for number in range(files)]
    write_pretrained(folder, document(golden), *shards)
    if files > 1:
        (folder / "unread.safetensors").write_bytes(b"no weights")
        index = folder / "model.safetensors.index.json"
        places = json.loads(index.read_text())["weight_map"]
        places["thinker.layers.0.weight"] = "unread.safetensors"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
