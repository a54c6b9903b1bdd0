"""Codecs of published and of small sizes with random weights; speed does not depend on training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from testkit.models.codec_models import CODECS
from testkit.models.family_golden import FamilyGolden
from token2wav.config.model_config import ModelConfig
from token2wav.families.moss import TransformerPart
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
# Sizes in the `config.json` of Audio8-TTS-Preview
AUDIO8: dict[str, Any] = {
    "num_codebooks": 10,
    "codebook_size": 4096,
    "codec_sample_rate": 44_100,
    "codec_frame_size": 2048,
    "codec_post_n_layer": 8,
    "codec_post_n_head": 16,
    "codec_post_n_local_heads": 8,
    "codec_post_intermediate_size": 1216,
}
EAR_TTS: dict[str, Any] = {
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
# The published sizes that differ from the defaults of `transformers`, by the weights of
# LiquidAI/LFM2.5-Audio-1.5B
LFM2_AUDIO: dict[str, Any] = {
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
# hubertsiuzdak/snac_24khz, and hubertsiuzdak/snac_44khz. snac_32khz differs from the latter in the
# sample rate alone.
SNAC_24KHZ: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
SNAC_44KHZ: dict[str, Any] = SNAC_24KHZ | {
    "sampling_rate": 44100,
    "encoder_dim": 64,
    "encoder_rates": [2, 3, 8, 8],
    "decoder_dim": 1536,
    "decoder_rates": [8, 8, 3, 2],
    "attn_window_size": 32,
    "vq_strides": [8, 4, 2, 1],
}
# openbmb/VoxCPM2, VoxCPM1.5 and VoxCPM-0.5B, which has no such section
VOXCPM2: dict[str, Any] = {
    "encoder_dim": 128,
    "encoder_rates": [2, 5, 8, 8],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [8, 6, 5, 2, 2, 2],
    "sr_bin_boundaries": [20000, 30000, 40000],
    "sample_rate": 16000,
    "out_sample_rate": 48000,
}
VOXCPM_1_5: dict[str, Any] = {
    "encoder_dim": 64,
    "encoder_rates": [2, 3, 6, 7, 7],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [7, 7, 6, 3, 2],
    "sample_rate": 44100,
}
# The published sizes of MOSS-TTSD 0.5
XY_TOKENIZER: dict[str, Any] = {
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
NEUCODEC: dict[str, Any] = {"model_type": "neucodec"}  # all others are defaults
WAVTOKENIZER: dict[str, Any] = {
    "sample_rate": 24000,
    "feature_extractor": {
        "class_path": "decoder.feature_extractors.EncodecFeatures",
        "init_args": {"num_quantizers": 1, "dowmsamples": [8, 5, 4, 2], "vq_bins": 4096},
    },
    "backbone": {
        "class_path": "decoder.models.VocosBackbone",
        "init_args": {
            "input_channels": 512,
            "dim": 768,
            "intermediate_dim": 2304,
            "num_layers": 12,
            "adanorm_num_embeddings": 4,
        },
    },
    "head": {
        "class_path": "decoder.heads.ISTFTHead",
        "init_args": {"dim": 768, "n_fft": 1280, "hop_length": 320, "padding": "same"},
    },
}
# Sizes of each codec, by the names of `CODECS`.
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
    "voxcpm": VOXCPM2,
    "causal_dac": AUDIO8,
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
    "voxcpm": {**VOXCPM2, "decoder_dim": 128},
    "causal_dac": {
        **AUDIO8,
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

    codecs: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen3-TTS": ("qwen3_tts", QWEN3_TTS),
        "Qwen3-Omni": ("qwen3_omni", QWEN3_OMNI),
        "Mimi": ("mimi", MIMI),
        "Pocket TTS": ("pocket_tts", POCKET_TTS),
        "NanoCodec": ("nanocodec", NANOCODEC),
        "DAC": ("dac", DAC),
        "DAC 24 kHz": ("dac", DAC_24KHZ),
        "Higgs Audio": ("higgs", HIGGS),
        "SNAC": ("snac", SNAC_24KHZ),
        "SNAC 44.1 kHz": ("snac_attention", SNAC_44KHZ),
        "MOSS": ("moss", {"quantizer_kwargs": {}}),
        "Audio8": ("causal_dac", AUDIO8),
        "EAR-TTS": ("ear_tts", EAR_TTS),
        "LFM2-Audio": ("lfm2_audio", LFM2_AUDIO),
        "Audex": ("audex", {}),
        "NeuCodec": ("neucodec", NEUCODEC),
        "X-Codec 2": ("neucodec", {"model_type": "xcodec2"}),
        "VibeVoice": ("vibevoice", {}),
        "VoxCPM2": ("voxcpm", VOXCPM2),
        "WavTokenizer": ("wavtokenizer", WAVTOKENIZER),
        "XY-Tokenizer": ("xy_tokenizer", XY_TOKENIZER),
    }
    configs = {}
    for name, (codec, sizes) in codecs.items():
        with TemporaryDirectory() as folder:
            configs[name] = read_config(CODECS[codec].write_document(Path(folder), sizes))
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
    # a writer reads only the sizes of golden data
    return CODECS[name].write(folder, SimpleNamespace(sizes=sizes or SIZES[name]))
