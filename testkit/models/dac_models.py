"""Formats of the codecs with the decoder of DAC: SNAC, Higgs Audio, Fish Speech and VoxCPM too."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from testkit.models.codec_row import Codec, Descript, Document, Weights, pointwise, slopes, unread
from testkit.models.published_weights import NORM, OLD_NORM, Naming, Rules
from testkit.models.random_weights import fill_dac

DAC_BOOKS: Rules = (
    (r"~(\d+)\.entries$", r".quantizers.\1.codebook.weight"),
    (r"~(\d+)\.(in|out)\.", r".quantizers.\1.\2_proj."),
)
_DAC_SHAPES = ((r"quantizer.*_proj\.weight$", pointwise), (r"\.alpha$", slopes))
_PACKAGE = Naming(DAC_BOOKS, _DAC_SHAPES, ((".", OLD_NORM),), numbered=True)
SNAC = Codec(
    replace(_PACKAGE, normed=((".", NORM),)),
    weights="pytorch_model.bin",
    fill=fill_dac,
    beside=unread("encoder.block.0.bias"),
)
DAC = Codec(
    Naming(DAC_BOOKS, _DAC_SHAPES),
    lambda sizes: {"model_type": "dac", "initializer_range": 0.02, **sizes},
    fill=fill_dac,
    beside=unread("encoder.conv1.bias"),
)
DESCRIPT = Descript(
    _PACKAGE,
    weights="weights.pth",
    fill=fill_dac,
    beside=unread("encoder.block.0.bias"),
)
HIGGS = replace(
    DAC,
    names=Naming(
        (
            (r"~(\d+)\.entries$", r".quantizers.\1.codebook.embed"),
            (r"~(\d+)\.(in|out)\.", r".quantizers.\1.project_\2."),
        ),
        ((r"\.alpha$", slopes),),
    ),
    document=lambda sizes: {
        "model_type": "higgs_audio_v2_tokenizer",
        "initializer_range": 0.02,
        **sizes,
    },
    beside=unread(
        *("encoder.conv1.bias", "semantic_model.encoder.weight", "fc1.weight"),
        *(f"quantizer.quantizers.0.codebook.{name}" for name in ("inited", "embed_avg")),
    ),
)
HIGGS_FIRST = replace(
    HIGGS,
    names=Naming(
        (
            (r"~(\d+)\.entries$", r".vq.layers.\1._codebook.embed"),
            (r"~(\d+)\.(in|out)\.", r".vq.layers.\1.project_\2."),
            (r"^fc2\.", "fc_post2."),
            (r"^acoustic_decoder\.", "decoder_2."),
        ),
        ((r"\.alpha$", slopes),),
        ((".", OLD_NORM),),
        numbered=True,
    ),
    document=dict,
    weights="model.pth",
    beside=unread("encoder.block.0.bias"),
    sizes=("tiny",),
)
CAUSAL_DAC = Codec(
    Naming(
        (
            *DAC_BOOKS,
            (r"^(semantic_quantizer|quantizer|post_module|upsample)\b", r"quantizer.\1"),
            (r"^norm\.", "quantizer.post_module.norm."),
            (r"~\w+", ".conv"),
            (r"\.self_attn\.qkv_proj\.", ".attention.wqkv."),
            (r"\.self_attn\.o_proj\.", ".attention.wo."),
            (r"\.mlp\.", ".feed_forward."),
            (r"\.input_layernorm\.", ".attention_norm."),
            (r"\.post_attention_layernorm\.", ".ffn_norm."),
            (r"\.self_attn_layer_scale\.scale$", ".attention_layer_scale.gamma"),
            (r"\.mlp_layer_scale\.scale$", ".ffn_layer_scale.gamma"),
        ),
        _DAC_SHAPES,
        ((r"_proj\.weight$", OLD_NORM), (r"^decoder\.", NORM)),
        joined=True,
        numbered=True,
    ),
    lambda sizes: {"model_type": "arktts", **sizes},
    weights="codec.pth",
    fill=fill_dac,
    beside=unread("encoder.block.0.conv.bias", "quantizer.pre_module.norm.weight"),
)
FISH = replace(
    CAUSAL_DAC,
    document=lambda sizes: {
        "model_type": "fish_qwen3_omni",
        "text_config": {"dim": 2560},
        **sizes,
    },
    beside=lambda sizes: {
        "quantizer.post_module.freqs_cis": torch.ones(4, 2, 2, dtype=torch.bfloat16),
        "quantizer.post_module.causal_mask": torch.ones(4, 4, dtype=torch.bool),
    },
    wrapper="generator",
)
FISH_S1 = replace(
    FISH,
    document=lambda sizes: {"model_type": "dual_ar", "dim": 1024, "n_layer": 28, **sizes},
    renamed=(("^", "generator."),),
    beside=unread("discriminator.model.0.weight"),
    wrapper="state_dict",
    golden="causal_dac_of_fish",
)


def _range_embedding(match: re.Match[str]) -> str:
    """Name of the scales or biases of all ranges of sample rates."""
    kind = {"weight": "scale", "bias": "bias"}[match[2]]
    return f"{match[1]}.{kind}_embed.weight"


def _voxcpm_tensors(sizes: Any) -> Weights:
    boundaries = sizes.sr_bin_boundaries
    ranges = torch.tensor(boundaries, dtype=torch.int32) if boundaries else None
    encoder = {"encoder.block.0.bias": torch.ones(3)}
    return encoder if ranges is None else {**encoder, "decoder.sr_bin_boundaries": ranges}


def _voxcpm_document(sizes: Document) -> Document:
    """Content of `config.json`, of VoxCPM2 if the sizes have an `out_sample_rate`."""
    architecture = {"architecture": "voxcpm2"} if "out_sample_rate" in sizes else {}
    section = {"audio_vae_config": sizes} if sizes else {}
    return {**architecture, "lm_config": {"hidden_size": 1024}, "feat_dim": 64, **section}


VOXCPM = Codec(
    replace(
        _PACKAGE,
        rules=((r"(sr_cond_model\.\d+)\.(weight|bias)$", _range_embedding),),
        shapes=(
            *_DAC_SHAPES,
            (r"sr_cond_model", lambda shape, sizes: (len(sizes.sr_bin_boundaries) + 1, *shape)),
        ),
    ),
    _voxcpm_document,
    weights="audiovae.pth",
    fill=fill_dac,
    beside=_voxcpm_tensors,
    wrapper="state_dict",
)
