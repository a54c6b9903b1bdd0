"""Tables of all codecs and of their other formats: the published files, with random weights. In
`tests/families`, `test_codec_contract.py` tests each codec, and `test_codec_formats.py` each
further format.

A new codec needs one row here, and golden data of its public code in `tests/data/families/NAME`,
see `family_golden.py`. The golden data define the tokens of the codec: latents or codes, and
whether a stream may have fewer codebooks.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from testkit.batches import Tokens
from testkit.models.codec_row import Codec, Document, pointwise, unread
from testkit.models.dac_models import (
    CAUSAL_DAC,
    DAC,
    DESCRIPT,
    FISH,
    FISH_S1,
    HIGGS,
    HIGGS_FIRST,
    SNAC,
    VOXCPM,
)
from testkit.models.mimi_models import (
    MIMI,
    MOSHI,
    MOSS,
    MOSS_STEREO,
    QWEN3_OMNI,
    QWEN3_TTS,
    ROPE,
    beside_an_unread_file,
)
from testkit.models.published_weights import NORM, OLD_NORM, Naming
from token2wav.config.model_config import ModelConfig
from token2wav.config.values import from_mapping
from token2wav.families.vibevoice import VibeVoiceSizes


def _nanocodec_document(sizes: Document) -> Document:
    modules = "nemo.collections.tts.modules.audio_codec_modules."
    decoder, quantizer = sizes["audio_decoder"], sizes["vector_quantizer"]
    return {
        "sample_rate": sizes["sample_rate"],
        "train_ds": {"batch_size": 16},  # the training is not read
        "audio_decoder": {"_target_": f"{modules}CausalHiFiGANDecoder", **decoder},
        "vector_quantizer": {"_target_": f"{modules}GroupFiniteScalarQuantizer", **quantizer},
    }


def write_archive(path: Path, members: Mapping[str, bytes], mode: str = "w") -> None:
    """Writes a tar file with a root folder and members."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        root = tarfile.TarInfo("./")
        root.type = tarfile.DIRTYPE
        archive.addfile(root)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, BytesIO(content))


def _packed(mode: str) -> Callable[[Path], None]:
    """Replaces all files by a NeMo archive."""

    def pack(folder: Path) -> None:
        files = sorted(folder.iterdir())
        members = {f"./{file.name}": file.read_bytes() for file in files}
        for file in files:
            file.unlink()
        write_archive(folder / "codec.nemo", members, mode)

    return pack


_NANOCODEC = Codec(
    Naming(
        ((r"~\w+", ".conv"), (r"\.alpha$", ".activation.snake_act.alpha")),
        normed=((".", NORM),),
    ),
    _nanocodec_document,
    file="model_config.yaml",
    weights="model_weights.ckpt",
    renamed=(("^", "audio_decoder."),),
    beside=unread("audio_encoder.pre_conv.conv.bias"),
    packed=_packed("w"),
)
_UNPACKED = replace(_NANOCODEC, packed=lambda folder: None, golden="nanocodec")


_EAR_TTS = "tts_model.audio_codec."


def _ear_tts_document(sizes: Document) -> Document:
    codec = {name: value for name, value in sizes.items() if name != "sample_rate"}
    return {
        "data": {"source_sample_rate": 16000},
        "model": {
            "stt": {"model": {"perception": {}}},
            "speech_generation": {
                "data": {"target_sample_rate": sizes["sample_rate"]},
                "model": {"tts_config": {}, "codec_config": codec},
            },
        },
    }


def _microsoft_document(sizes: Document) -> Document:
    all_sizes = from_mapping(VibeVoiceSizes, sizes, "")
    section = {
        "vae_dim": all_sizes.hidden_size,
        "encoder_ratios": [1],
        "decoder_ratios": list(all_sizes.downsampling_ratios[::-1]),
        "encoder_depths": "-".join(map(str, all_sizes.depths)),
        "decoder_depths": None,
        "encoder_n_filters": 99,
        "decoder_n_filters": all_sizes.num_filters,
        "layernorm_eps": all_sizes.rms_norm_eps,
        "mixer_layer": "depthwise_conv",
    }
    return {"model_type": "vibevoice_streaming", "acoustic_tokenizer_config": section}


_VIBEVOICE = Codec(
    Naming(
        (
            (r"^upsample_layers\.0~\w+", "stem.conv.conv"),
            (
                r"^upsample_layers\.(\d+)~\w+",
                lambda match: f"conv_layers.{int(match[1]) - 1}.convtr.convtr",
            ),
            (r"^stages\.0\.", "stem.stage."),
            (r"^stages\.(\d+)\.", lambda match: f"conv_layers.{int(match[1]) - 1}.stage."),
            (r"~\w+", ".conv"),
            ("^", "decoder."),
        )
    ),
    lambda sizes: {"model_type": "vibevoice_acoustic_tokenizer", **sizes},
    beside=unread("encoder.stem.conv.conv.bias"),
)
_MICROSOFT = replace(
    _VIBEVOICE,
    document=_microsoft_document,
    renamed=(
        (r"^decoder\.", "model.acoustic_tokenizer.decoder."),
        (r"\.mixer\.conv\.", ".mixer.conv.conv.conv."),
        (r"\.head\.conv\.", ".head.conv.conv."),
        (r"\.stem\.conv\.", ".upsample_layers.0.0.conv."),
        (r"\.stem\.stage\.", ".stages.0."),
        (r"\.conv_layers\.(\d+)\.stage\.", lambda match: f".stages.{int(match[1]) + 1}."),
        (
            r"\.conv_layers\.(\d+)\.convtr\.",
            lambda match: f".upsample_layers.{int(match[1]) + 1}.0.convtr.",
        ),
    ),
    beside=lambda sizes: {
        "model.speech_scaling_factor": torch.ones(()),
        "model.speech_bias_factor": torch.zeros(()),
        "model.language_model.norm.weight": torch.ones(4),
    },
    shards=3,
    golden="vibevoice",
)


_XY_TOKENIZER = Codec(
    Naming(
        (
            (r"~(\d+)\.entries$", r".quantizers.\1.codebook"),
            (r"~(\d+)\.uses$", r".quantizers.\1.cluster_size"),
            (r"~(\d+)\.initialized$", r".quantizers.\1.inited"),
            (r"^output_proj\.", "quantizer.output_proj."),
            (r"^upsample(~\w+)?\.", "upsample.up_conv."),
            (r"^vocos\.out\.", "enhanced_vocos.head.out."),
            (r"^vocos\.", "enhanced_vocos.backbone."),
            (r"\.mlp\.", "."),
            (r"\.input_layernorm\.", ".self_attn_layer_norm."),
            (r"\.post_attention_layernorm\.", ".final_layer_norm."),
            (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
        ),
        ((r"^quantizer\.output_proj\.weight$", pointwise),),
        ((r"^quantizer\.output_proj\.", OLD_NORM),),
    ),
    lambda sizes: {
        "model_type": "xy_tokenizer",
        "sampling_rate": sizes.get("output_sample_rate") or sizes["sample_rate"],
        "params": sizes,
    },
    renamed=((r"\.fc", ".mlp.fc"),),
    beside=unread(
        "acoustic_decoder.positional_embedding",
        "enhanced_vocos.head.istft.window",
        "quantizer.input_proj.bias",
        "semantic_encoder.conv1.bias",
    ),
    windows=True,
)
_XY_AUTHORS = replace(
    _XY_TOKENIZER,
    document=lambda sizes: {"sample_rate": 16000, "generator_params": sizes},
    file="xy_tokenizer_config.yaml",
    weights="xy_tokenizer.ckpt",
    renamed=(),
    wrapper="generator",
    golden="xy_tokenizer",
)

_WAVTOKENIZER = Codec(
    Naming(
        (
            (
                r"^quantizer~(\d+)\.entries$",
                r"feature_extractor.encodec.quantizer.vq.layers.\1._codebook.embed",
            ),
            (r"^vocos\.out\.", "head.out."),
            (r"^vocos\.", "backbone."),
            (r"~\w+", ""),
        ),
        ((r"\.(q|k|v|proj_out)\.weight$", pointwise),),
    ),
    lambda sizes: {
        "seed_everything": 3407,
        "model": {
            "class_path": "decoder.experiment.WavTokenizer",
            "init_args": {"initial_learning_rate": 2e-4, "resume": False, **sizes},
        },
    },
    file="wavtokenizer_small.yaml",
    weights="WavTokenizer_small.ckpt",
    beside=unread(
        "feature_extractor.encodec.encoder.model.0.conv.conv.bias",
        "feature_extractor.encodec.quantizer.vq.layers.0._codebook.cluster_size",
        "head.istft.window",
        "multiperioddisc.discriminators.0.bias",
    ),
    wrapper="state_dict",
    windows=True,
)

# Each codec in its usual format.
CODECS: dict[str, Codec] = {
    "audex": Codec(
        Naming(
            (
                (r"^project_out\.", "audex_speech_token_embedder.project_out."),
                (r"^lookahead\.(\w+)~\w+", r"module.lookahead_\1"),
                (r"^transformer\.layers\.", "module.backbone.transformers."),
                (r"^(?=final)", "module.backbone."),
                (r"^head\.", "module.head.proj."),
                (r"^(?=fc_)", "module."),
                (r"\.input_layernorm\.", ".att_norm."),
                (r"\.post_attention_layernorm\.", ".ffn_norm."),
                (r"\.self_attn\.qkv_proj\.", ".att.c_attn."),
                (r"\.self_attn\.o_proj\.", ".att.c_proj."),
            ),
            joined=True,
        ),
        lambda sizes: {
            "model_type": "audex_causal_speech_decoder",
            "architectures": ["AudexCausalSpeechDecoderModel"],
            **sizes,
        },
        beside=unread("module.wav_proj.weight"),
    ),
    "causal_dac": CAUSAL_DAC,
    "dac": DAC,
    "ear_tts": Codec(
        Naming(
            (
                (r"^codebooks~(\d+)\.entries$", r"prvq.mus_list.\1"),
                (r"^layers\.", "decoder.layers."),
            ),
            ((r"\.pwconv\d\.weight$", pointwise),),
        ),
        _ear_tts_document,
        renamed=(("^", _EAR_TTS),),
        beside=unread(
            f"{_EAR_TTS}encoder.layers.0.weight",
            f"{_EAR_TTS}prvq._variance_list.0.variance",
            "tts_model.tts_model.embed.weight",
        ),
    ),
    "higgs": HIGGS,
    "lfm2_audio": Codec(
        Naming(((r"^emb\.", "emb.emb."), (r"\.o_proj\.", ".out_proj."))),
        lambda sizes: {"model_type": "lfm2", "vocab_size": 65536, "use_pos_enc": True, **sizes},
        beside=unread("lfm.embed_tokens.weight", "istft.window"),
    ),
    "mimi": MIMI,
    "moss": MOSS,
    "moss_stereo": MOSS_STEREO,
    "nanocodec": _NANOCODEC,
    "neucodec": Codec(
        Naming(
            (
                (r"^head\.", "head.linear."),
                (r"^project_out\.", "quantizer.project_out."),
                (r"^(?!quantizer\.)", "acoustic_decoder."),
            )
        ),
        lambda sizes: {
            "model_type": "neucodec",
            **ROPE,
            "semantic_model_config": {"model_type": "wav2vec2-bert", "hidden_size": 1024},
            **sizes,
        },
        beside=unread("quantizer.project_in.bias", "fc_encoder.bias"),
        windows=True,
    ),
    "pocket_tts": Codec(
        Naming(
            (
                (r"~\w+", ".conv"),
                (r"^decoder\.", "decoder.decoder_seanet."),
                (r"^(upsample|decoder_transformer)\.", r"decoder.\1."),
            )
        ),
        lambda sizes: {"model_type": "pocket_tts_audio_tokenizer", **ROPE, **sizes},
        beside=unread("encoder.layers.0.conv.bias"),
    ),
    "qwen3_tts": QWEN3_TTS,
    "qwen3_omni": QWEN3_OMNI,
    "snac": SNAC,
    "snac_attention": SNAC,
    "vibevoice": _VIBEVOICE,
    "voxcpm": VOXCPM,
    "wavtokenizer": _WAVTOKENIZER,
    "xy_tokenizer": _XY_TOKENIZER,
}
# Further formats of the same codecs.
FORMATS: dict[str, Codec] = {
    "causal_dac_of_fish": FISH,
    "dac_of_descript": DESCRIPT,
    "fish_s1": FISH_S1,
    "higgs_first_release": HIGGS_FIRST,
    "mimi_of_moshi": MOSHI,
    "mimi_pickle": replace(MIMI, weights="pytorch_model.bin", golden="mimi"),
    "moshi_older_names": replace(
        MOSHI,
        renamed=((r"in_projs\.0\.weight$", "in_proj_weight"), (r"out_projs\.0\.", "out_proj.")),
        golden="mimi_of_moshi",
    ),
    "nanocodec_compressed": replace(_NANOCODEC, packed=_packed("w:gz"), golden="nanocodec"),
    "nanocodec_unpacked": replace(_UNPACKED, weights="model_weights.safetensors"),
    "nanocodec_unpacked_pickle": _UNPACKED,
    "qwen3_omni_in_files": replace(
        QWEN3_OMNI, shards=3, packed=beside_an_unread_file, golden="qwen3_omni"
    ),
    "vibevoice_of_microsoft": _MICROSOFT,
    "vibevoice_of_transformers": replace(
        _VIBEVOICE,
        document=lambda sizes: {
            "model_type": "vibevoice",
            "audio_config": sizes,
            "text_config": {},
        },
        renamed=((r"^decoder\.", "model.audio_tower.decoder."),),
        beside=lambda sizes: {
            "model.latent_scaling_factor": torch.ones(()),
            "model.latent_bias_factor": torch.zeros(()),
        },
        golden="vibevoice",
    ),
    "voxcpm_bare": replace(VOXCPM, wrapper="", golden="voxcpm"),
    "voxcpm_safetensors": replace(
        VOXCPM,
        weights="audiovae.safetensors",
        packed=lambda folder: (folder / "audiovae.pth").write_text("not read"),
        golden="voxcpm",
    ),
    "xy_tokenizer_of_its_authors": replace(
        _XY_AUTHORS, renamed=((r"^enhanced_vocos\.", "vocos."),)
    ),
    "xy_tokenizer_of_moss_ttsd": _XY_AUTHORS,
}


def drawn_tokens(config: ModelConfig, count: int) -> Tokens:
    """Draws `count` tokens of a codec: codes or latents."""
    return config.tokens.draw(count, np.random.default_rng(count))
