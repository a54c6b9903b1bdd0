"""Formats of Mimi, and of the codecs with its quantizer or its transformer: Qwen3 and MOSS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from testkit.models.codec_row import Codec, Document, Weights, pointwise, unread
from testkit.models.dac_models import DAC_BOOKS
from testkit.models.published_weights import NORM, Naming, Rules
from testkit.models.random_weights import fill_qwen3

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_MIMI_SHAPES = ((r"quantizer.*put_proj\.weight$", pointwise),)
MIMI = Codec(
    Naming(
        (
            (r"\.(semantic|acoustic)\b", r".\1_residual_vector_quantizer"),
            (r"~(\d+)\.entries$", r".layers.\1.codebook.embed_sum"),
            (r"~(\d+)\.uses$", r".layers.\1.codebook.cluster_usage"),
            (r"~(\d+)\.initialized$", r".layers.\1.codebook.initialized"),
            (r"~\w+", ".conv"),
        ),
        _MIMI_SHAPES,
    ),
    lambda sizes: {
        "model_type": "mimi",
        "architectures": ["MimiModel"],
        "use_streaming": False,
        **sizes,
        **ROPE,
    },
    beside=unread("encoder.layers.0.conv.bias"),
)
_RVQ: Rules = (
    (r"quantizer\.semantic\b", "quantizer.rvq_first"),
    (r"quantizer\.acoustic\b", "quantizer.rvq_rest"),
    (r"~(\d+)\.entries$", r".vq.layers.\1._codebook.embedding_sum"),
    (r"~(\d+)\.uses$", r".vq.layers.\1._codebook.cluster_usage"),
    (r"~(\d+)\.initialized$", r".vq.layers.\1._codebook._initialized"),
)
_MOSHI_LAYERS: Rules = (
    (r"\.input_layernorm\.", ".norm1."),
    (r"\.post_attention_layernorm\.", ".norm2."),
    (r"\.self_attn_layer_scale\.", ".layer_scale_1."),
    (r"\.mlp_layer_scale\.", ".layer_scale_2."),
)
_MOSHI_1: Rules = (
    *_MOSHI_LAYERS,
    (r"\.qkv_proj\.", ".in_projs.0."),
    (r"\.o_proj\.", ".out_projs.0."),
    (r"\.mlp\.fc([12])\.", r".linear\1."),
)
MOSHI_WEIGHTS = "tokenizer-0123abcd-checkpoint125.safetensors"
MOSHI = Codec(
    Naming(
        (
            *_RVQ,
            *_MOSHI_1,
            (r"^decoder\.layers\.", "decoder.model."),
            (r"^decoder_transformer\.", "decoder_transformer.transformer."),
            (r"^upsample~", "upsample.convtr~"),
            (r"~(\w+)", r".\1.\1"),
        ),
        _MIMI_SHAPES,
        joined=True,
    ),
    file="mimi_config.json",
    weights=MOSHI_WEIGHTS,
    further_files={
        "config.json": {
            "model_type": "moshi",
            "mimi_name": MOSHI_WEIGHTS,
            "mimi_config_name": "mimi_config.json",
            "dim": 4096,
        }
    },
    beside=unread("encoder.model.0.conv.conv.bias"),
)


def _moss_encoder(sizes: Any) -> Weights:
    width, inputs = sizes.quantizer.width, sizes.quantizer.input_dim
    gain, direction = (f"quantizer.input_proj{end}" for end in NORM)
    return {
        "encoder.1.output_proj.weight": torch.ones(3, 3),
        "quantizer.input_proj.bias": torch.ones(width),
        gain: torch.ones(width, 1, 1),
        direction: torch.ones(width, inputs, 1),
    }


def _moss(layers: Rules) -> Codec:
    return Codec(
        Naming(
            (*DAC_BOOKS, *layers, (r"^output_proj\.", "quantizer.output_proj.")),
            ((r"^quantizer\..*_proj\.weight$", pointwise),),
            ((r"^quantizer\.", NORM),),
            joined=True,
        ),
        lambda sizes: {
            "model_type": "moss-audio-tokenizer",
            "sampling_rate": 24000,
            "downsample_rate": 1920,
            "number_channels": None,
            "encoder_kwargs": [],  # not read
            **sizes,
            "quantizer_kwargs": {"quantizer_type": "rlfq", **sizes["quantizer_kwargs"]},
        },
        beside=_moss_encoder,
    )


MOSS = _moss(_MOSHI_1)
MOSS_STEREO = _moss(
    (
        *_MOSHI_LAYERS,
        (r"\.qkv_proj\.", ".in_proj."),
        (r"\.o_proj\.", ".out_proj."),
        (r"\.mlp\.fc1\.", ".ffn.0."),
        (r"\.mlp\.fc2\.", ".ffn.2."),
    )
)


def _named_in_a_unit(match: re.Match[str]) -> str:
    """Name of a layer in a residual unit."""
    return f"{match[1]}.{('act1', 'conv1', 'act2', 'conv2')[int(match[2])]}"


def _qwen3(prefix: str, document: Callable[[Document], Document], unread_name: str) -> Codec:
    return Codec(
        Naming(
            (
                (r"^pre_transformer\.transformer\.", "pre_transformer."),
                (r"^decoder\.model\.", "decoder."),
                (r"(block\.\d)\.block\.(\d)", _named_in_a_unit),
                *_RVQ,
                (r"~\w+", ".conv"),
            ),
            _MIMI_SHAPES,
            numbered=True,
        ),
        document,
        fill=fill_qwen3,
        renamed=(("^", prefix),),
        beside=unread(unread_name),
    )


def _omni_document(sizes: Document) -> Document:
    rope = {**ROPE["rope_parameters"], "rope_theta": sizes.get("rope_theta", 10000.0)}
    section = {**sizes, "rope_parameters": rope, "attention_dropout": 0.0}
    return {"model_type": "qwen3_omni_moe", "code2wav_config": section, "talker_config": {}}


QWEN3_OMNI = _qwen3("code2wav.", _omni_document, "talker.codec_head.weight")
QWEN3_TTS = _qwen3(
    "decoder.",
    lambda sizes: {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "decoder_config": {**sizes, "layer_scale_initial_scale": 0.01},
        "encoder_config": {"hidden_size": 1},
        "output_sample_rate": 24000,
    },
    "encoder.layers.0.weight",
)


def beside_an_unread_file(folder: Path) -> None:
    """Adds a file of weights to the index, none of which belongs to the decoder."""
    (folder / "unread.safetensors").write_bytes(b"no weights")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places["thinker.layers.0.weight"] = "unread.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
