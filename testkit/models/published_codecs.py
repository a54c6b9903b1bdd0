"""Codecs of published and of small sizes with random weights; speed does not depend on training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import yaml

from testkit.models import (
    causal_dac_model,
    dac_model,
    ear_tts_model,
    lfm2_audio_model,
    mimi_model,
    nanocodec_model,
    pocket_model,
    qwen3_model,
    voxcpm_model,
    xy_tokenizer_model,
)
from testkit.models.codec_models import WRITERS
from testkit.models.family_golden import FamilyGolden
from testkit.models.snac_model import SNAC_24KHZ, SNAC_44KHZ
from token2wav.config.model_config import ModelConfig
from token2wav.families.moss.config import TransformerPart
from token2wav.published.registry import read_config

QWEN3_TTS = {
    "codebook_size": 2048,
    "codebook_dim": 512,
    "latent_dim": 1024,
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "sliding_window": 72,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_quantizers": 16,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 1536,
}
QWEN3_OMNI = {
    **{name: value for name, value in QWEN3_TTS.items() if not name.endswith("_dim")},
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "decoder_dim": 1536,
}
MIMI = {"num_quantizers": 8, "codebook_size": 2048}
POCKET_TTS: dict[str, Any] = {}  # the library has the published sizes as defaults
NANOCODEC: dict[str, Any] = {
    "sample_rate": 22050,
    "audio_decoder": {
        "input_dim": 16,
        "up_sample_rates": [7, 7, 6, 3, 2],
        "base_channels": 864,
        "activation": "half_snake",
        "output_activation": "clamp",
    },
    "vector_quantizer": {"num_groups": 4, "num_levels_per_group": [9, 8, 8, 7]},
}
MOSHI: dict[str, Any] = {"quantizer": {"n_q": 8}}
DAC: dict[str, Any] = {"sampling_rate": 44100}
DAC_24KHZ: dict[str, Any] = {
    "sampling_rate": 24000,
    "n_codebooks": 32,
    "downsampling_ratios": [2, 4, 5, 8],
}
DAC_NARROW: dict[str, Any] = {**DAC, "decoder_hidden_size": 512}  # published: 1536
HIGGS_RATES = (8, 5, 4, 2, 3)
HIGGS: dict[str, Any] = {
    "target_bandwidths": [0.5, 1, 1.5, 2],
    "acoustic_model_config": {
        "model_type": "dac",
        "encoder_hidden_size": 64,
        "downsampling_ratios": HIGGS_RATES,
        "upsampling_ratios": HIGGS_RATES,
        "decoder_hidden_size": 1024,
        "hidden_size": 256,
    },
    "semantic_model_config": {"model_type": "hubert", "hidden_size": 768},
}
# Sizes of each codec, by the names of `WRITERS`.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_tts": QWEN3_TTS,
    "qwen3_omni": QWEN3_OMNI,
    "mimi": MIMI,
    "pocket_tts": POCKET_TTS,
    "nanocodec": NANOCODEC,
    "dac": DAC,
    "higgs": HIGGS,
    "snac": SNAC_24KHZ,
    "snac_attention": SNAC_44KHZ,
    "voxcpm": voxcpm_model.VOXCPM2,
    "causal_dac": causal_dac_model.AUDIO8,
}
# Sizes with a sixteenth of the channels or so, at the published frame rates, sample rates and
# numbers of codebooks. The MOSS Audio Tokenizer has the sizes of the golden data.
_FEW_LAYERS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}
SIXTEENTH: dict[str, dict[str, Any]] = {
    "qwen3_tts": {
        **QWEN3_TTS,
        **_FEW_LAYERS,
        "codebook_dim": 64,
        "latent_dim": 128,
        "hidden_size": 64,
        "head_dim": 16,
        "decoder_dim": 96,
    },
    "qwen3_omni": {**QWEN3_OMNI, **_FEW_LAYERS, "hidden_size": 64, "decoder_dim": 96},
    "mimi": {
        **MIMI,
        **_FEW_LAYERS,
        "hidden_size": 64,
        "num_filters": 8,
        "codebook_dim": 32,
        "vector_quantization_hidden_dimension": 32,
        "upsample_groups": 64,
    },
    "nanocodec": {
        **NANOCODEC,
        "audio_decoder": {**NANOCODEC["audio_decoder"], "base_channels": 64},
    },
    "dac": {**DAC, "encoder_hidden_size": 8, "decoder_hidden_size": 48},
    "higgs": {
        **HIGGS,
        "acoustic_model_config": {
            **HIGGS["acoustic_model_config"],
            "encoder_hidden_size": 8,
            "decoder_hidden_size": 32,
            "hidden_size": 32,
        },
        "semantic_model_config": {"model_type": "hubert", "hidden_size": 96},
    },
    "snac": {**SNAC_24KHZ, "encoder_dim": 6, "decoder_dim": 32},
    "snac_attention": {**SNAC_44KHZ, "encoder_dim": 8, "decoder_dim": 64},
    "voxcpm": {**voxcpm_model.VOXCPM2, "decoder_dim": 128},
    "causal_dac": {
        **causal_dac_model.AUDIO8,
        "codec_post_n_layer": 2,
        "codec_post_n_head": 4,
        "codec_post_n_local_heads": 2,
        "codec_post_intermediate_size": 76,
        "codec_head_dim": 16,
        "codec_latent_dim": 64,
        "codec_decoder_dim": 96,
    },
    "moss": FamilyGolden("moss", "small").sizes,
}


def codec_configs() -> dict[str, ModelConfig]:
    """Makes the configuration of every codec at its published size, by names for tables."""

    def golden(sizes: dict[str, Any]) -> Any:
        return SimpleNamespace(sizes=sizes)

    nanocodec = nanocodec_model.document(golden(NANOCODEC))
    documents: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen3-TTS": ("config.json", qwen3_model.document(golden(QWEN3_TTS))),
        "Qwen3-Omni": ("config.json", qwen3_model.document(golden(QWEN3_OMNI))),
        "Mimi": ("config.json", mimi_model.document(golden(MIMI))),
        "Pocket TTS": ("config.json", pocket_model.document(golden(POCKET_TTS))),
        "NanoCodec": ("model_config.yaml", nanocodec),
        "DAC": ("config.json", dac_model.document(DAC)),
        "DAC 24 kHz": ("config.json", dac_model.document(DAC_24KHZ)),
        "Higgs Audio": ("config.json", dac_model.document(HIGGS, "higgs")),
        "SNAC": ("config.json", SNAC_24KHZ),
        "SNAC 44.1 kHz": ("config.json", SNAC_44KHZ),
        "MOSS": ("config.json", {"model_type": "moss-audio-tokenizer"}),
        "Audio8": ("config.json", {"model_type": "arktts", **causal_dac_model.AUDIO8}),
        "EAR-TTS": ("config.json", ear_tts_model.document(golden(ear_tts_model.PUBLISHED))),
        "LFM2-Audio": ("config.json", lfm2_audio_model.document(lfm2_audio_model.PUBLISHED)),
        "VibeVoice": ("config.json", {"model_type": "vibevoice_acoustic_tokenizer"}),
        "VoxCPM2": ("config.json", voxcpm_model.document(voxcpm_model.VOXCPM2)),
        "XY-Tokenizer": ("config.json", xy_tokenizer_model.document(xy_tokenizer_model.PUBLISHED)),
    }
    configs = {}
    for name, (file, content) in documents.items():
        with TemporaryDirectory() as folder:
            # YAML contains JSON, so both files may have the same content.
            dump = yaml.safe_dump if file.endswith("yaml") else json.dumps
            (Path(folder) / file).write_text(dump(content))
            configs[name] = read_config(Path(folder))
    return configs


def moss_sizes() -> dict[str, Any]:
    """Returns the published sizes of the MOSS Audio Tokenizer, which this library has as defaults.

    They are no part of `SIZES`: the weights have 3.5 GB.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({"model_type": "moss-audio-tokenizer"})
        )
        config: Any = read_config(Path(folder))
    sizes = config.sizes
    parts = [
        {
            "module_type": "Transformer"
            if isinstance(part, TransformerPart)
            else "PatchedPretransform",
            **{name: value for name, value in asdict(part).items() if value is not None},
        }
        for part in sizes.parts
    ]
    return {
        "causal_transformer_context_duration": sizes.context_duration,
        "quantizer_kwargs": asdict(sizes.quantizer),
        "decoder_kwargs": parts,
    }


def write_codec(name: str, folder: Path, sizes: dict[str, Any] | None = None) -> Path:
    """Writes the folder of a codec, of its published size if no sizes are given, and returns it."""
    golden: Any = SimpleNamespace(sizes=sizes or SIZES[name])  # a writer reads only the sizes
    return WRITERS[name](folder, golden)
