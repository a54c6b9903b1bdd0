"""Tables of all codecs and of their other formats: the published files, with random weights.
`tests/families/test_codec_contract.py` tests each row.

A new codec needs one row here, and golden data of its public code in `tests/data/families/NAME`
(`family_golden.py` describes them). The golden data say what the codec takes: latents or codes, and
whether a stream may have fewer codebooks.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from testkit.batches import Tokens
from testkit.models.published_weights import NORM, OLD_NORM, Naming, Rules, renamed
from testkit.models.random_weights import fill_dac, fill_qwen3, fill_state
from testkit.models.shards import write_pretrained
from token2wav.config.model_config import ModelConfig
from token2wav.config.values import from_mapping
from token2wav.families.vibevoice import VibeVoiceSizes
from token2wav.published.registry import read_config, unfilled_network

Document = dict[str, Any]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Codec:
    """Row of the table.

    Attributes:
        names: names of the weights. They select the random values.
        document: content of the configuration file for the sizes of golden data.
        file, weights: files of the configuration and of the weights.
        others: further files of JSON.
        fill: draws the values of the weights.
        renamed: rules for the names of the weights after their values are drawn.
        beside: tensors beside the weights of the network, by its sizes. Most are of other parts of
            the model, and are not read.
        wrapper: key of the weights in a pickle.
        shards: number of files of weights.
        packed: packs all files into an archive.
        golden: name of the golden data; empty if it is the name of the row.
        windows: whether the decoder is not causal. Its whole utterances are tested as those of any
            codec, and its windows in `test_window_contract.py`.
        sizes: sizes of the golden data.
    """

    names: Naming
    document: Callable[[Document], Document] = dict
    file: str = "config.json"
    weights: str = "model.safetensors"
    others: Mapping[str, Document] = field(default_factory=dict)
    fill: Callable[[Weights], Weights] = fill_state
    renamed: Rules = ()
    beside: Callable[[Any], Weights] = lambda sizes: {}
    wrapper: str = ""
    shards: int = 1
    packed: Callable[[Path], object] = lambda folder: None
    golden: str = ""
    windows: bool = False
    sizes: tuple[str, ...] = ("tiny", "small")

    def write(self, folder: Path, sizes: Document) -> Path:
        """Writes a model folder, and returns the folder."""
        self.write_document(folder, sizes)
        weights = self.published_weights(folder)
        if self.shards > 1:
            (folder / self.weights).unlink()
            named = list(weights.items())
            write_pretrained(
                folder,
                self.document(sizes),
                *(dict(named[start :: self.shards]) for start in range(self.shards)),
            )
        elif self.weights.endswith(".safetensors"):
            save_file(weights, folder / self.weights)
        else:
            torch.save({self.wrapper: weights} if self.wrapper else weights, folder / self.weights)
        self.packed(folder)
        return folder

    def write_document(self, folder: Path, sizes: Document) -> Path:
        """Writes a model folder without weights, and returns the folder."""
        for name, document in {self.file: self.document(sizes), **self.others}.items():
            dump = yaml.safe_dump if name.endswith(".yaml") else json.dumps
            (folder / name).write_text(dump(document))
        (folder / self.weights).touch()
        return folder

    def published_weights(self, folder: Path) -> Weights:
        """Returns the weights for the configuration of a folder."""
        config: Any = read_config(folder)
        weights = self.fill(self.names.weights(unfilled_network(config, "decoder"), config.sizes))
        named = {renamed(name, self.renamed): value for name, value in weights.items()}
        return named | self.beside(config.sizes)


class Descript(Codec):
    """Codec in the format of `descript-audio-codec`, which has the sizes in the file of weights."""

    def write(self, folder: Path, sizes: Document) -> Path:
        content: dict[str, Any] = {"metadata": {"kwargs": {**sizes, "quantizer_dropout": 0.5}}}
        torch.save(content, folder / self.weights)
        content["state_dict"] = self.published_weights(folder)
        torch.save(content, folder / self.weights)
        return folder


def _pointwise(shape: tuple[int, ...], _: Any) -> tuple[int, ...]:
    """Shape of a product that is published as a convolution with a kernel of one."""
    return (*shape, 1)


def _slopes(shape: tuple[int, ...], _: Any) -> tuple[int, ...]:
    return (1, *shape, 1)


def _unread(*names: str) -> Callable[[Any], Weights]:
    return lambda sizes: {name: torch.ones(3) for name in names}


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_DAC_BOOKS: Rules = (
    (r"~(\d+)\.entries$", r".quantizers.\1.codebook.weight"),
    (r"~(\d+)\.(in|out)\.", r".quantizers.\1.\2_proj."),
)
_DAC_SHAPES = ((r"quantizer.*_proj\.weight$", _pointwise), (r"\.alpha$", _slopes))
_PACKAGE = Naming(_DAC_BOOKS, _DAC_SHAPES, ((".", OLD_NORM),), numbered=True)
_SNAC = Codec(
    replace(_PACKAGE, normed=((".", NORM),)),
    weights="pytorch_model.bin",
    fill=fill_dac,
    beside=_unread("encoder.block.0.bias"),
)
_DAC = Codec(
    Naming(_DAC_BOOKS, _DAC_SHAPES),
    lambda sizes: {"model_type": "dac", "initializer_range": 0.02, **sizes},
    fill=fill_dac,
    beside=_unread("encoder.conv1.bias"),
)
_HIGGS = replace(
    _DAC,
    names=Naming(
        (
            (r"~(\d+)\.entries$", r".quantizers.\1.codebook.embed"),
            (r"~(\d+)\.(in|out)\.", r".quantizers.\1.project_\2."),
        ),
        ((r"\.alpha$", _slopes),),
    ),
    document=lambda sizes: {
        "model_type": "higgs_audio_v2_tokenizer",
        "initializer_range": 0.02,
        **sizes,
    },
    beside=_unread(
        *("encoder.conv1.bias", "semantic_model.encoder.weight", "fc1.weight"),
        *(f"quantizer.quantizers.0.codebook.{name}" for name in ("inited", "embed_avg")),
    ),
)
_HIGGS_FIRST = replace(
    _HIGGS,
    names=Naming(
        (
            (r"~(\d+)\.entries$", r".vq.layers.\1._codebook.embed"),
            (r"~(\d+)\.(in|out)\.", r".vq.layers.\1.project_\2."),
            (r"^fc2\.", "fc_post2."),
            (r"^acoustic_decoder\.", "decoder_2."),
        ),
        ((r"\.alpha$", _slopes),),
        ((".", OLD_NORM),),
        numbered=True,
    ),
    document=dict,
    weights="model.pth",
    beside=_unread("encoder.block.0.bias"),
    sizes=("tiny",),
)


_CAUSAL_DAC = Codec(
    Naming(
        (
            *_DAC_BOOKS,
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
    beside=_unread("encoder.block.0.conv.bias", "quantizer.pre_module.norm.weight"),
)
_FISH = replace(
    _CAUSAL_DAC,
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
_MIMI_SHAPES = ((r"quantizer.*put_proj\.weight$", _pointwise),)
_MIMI = Codec(
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
    beside=_unread("encoder.layers.0.conv.bias"),
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
_MOSHI = Codec(
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
    others={
        "config.json": {
            "model_type": "moshi",
            "mimi_name": MOSHI_WEIGHTS,
            "mimi_config_name": "mimi_config.json",
            "dim": 4096,
        }
    },
    beside=_unread("encoder.model.0.conv.conv.bias"),
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
            (*_DAC_BOOKS, *layers, (r"^output_proj\.", "quantizer.output_proj.")),
            ((r"^quantizer\..*_proj\.weight$", _pointwise),),
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
    beside=_unread("audio_encoder.pre_conv.conv.bias"),
    packed=_packed("w"),
)
_UNPACKED = replace(_NANOCODEC, packed=lambda folder: None, golden="nanocodec")


def _named_in_a_unit(match: re.Match[str]) -> str:
    """Name of a layer in a residual unit."""
    return f"{match[1]}.{('act1', 'conv1', 'act2', 'conv2')[int(match[2])]}"


def _qwen3(prefix: str, document: Callable[[Document], Document], unread: str) -> Codec:
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
        beside=_unread(unread),
    )


def _omni_document(sizes: Document) -> Document:
    rope = {**ROPE["rope_parameters"], "rope_theta": sizes.get("rope_theta", 10000.0)}
    section = {**sizes, "rope_parameters": rope, "attention_dropout": 0.0}
    return {"model_type": "qwen3_omni_moe", "code2wav_config": section, "talker_config": {}}


_QWEN3_OMNI = _qwen3("code2wav.", _omni_document, "talker.codec_head.weight")


def _beside_an_unread_file(folder: Path) -> None:
    """Adds a file of weights to the index, none of which belongs to the decoder."""
    (folder / "unread.safetensors").write_bytes(b"no weights")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places["thinker.layers.0.weight"] = "unread.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


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
    beside=_unread("encoder.stem.conv.conv.bias"),
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


def _range_embedding(match: re.Match[str]) -> str:
    """Name of the scales or biases of all ranges of sample rates."""
    kind = {"weight": "scale", "bias": "bias"}[match[2]]
    return f"{match[1]}.{kind}_embed.weight"


def _voxcpm_tensors(sizes: Any) -> Weights:
    boundaries = sizes.sr_bin_boundaries
    ranges = torch.tensor(boundaries, dtype=torch.int32) if boundaries else None
    unread = {"encoder.block.0.bias": torch.ones(3)}
    return unread if ranges is None else {**unread, "decoder.sr_bin_boundaries": ranges}


def _voxcpm_document(sizes: Document) -> Document:
    """Content of `config.json`, of VoxCPM2 if the sizes have an `out_sample_rate`."""
    architecture = {"architecture": "voxcpm2"} if "out_sample_rate" in sizes else {}
    section = {"audio_vae_config": sizes} if sizes else {}
    return {**architecture, "lm_config": {"hidden_size": 1024}, "feat_dim": 64, **section}


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
        ((r"^quantizer\.output_proj\.weight$", _pointwise),),
        ((r"^quantizer\.output_proj\.", OLD_NORM),),
    ),
    lambda sizes: {
        "model_type": "xy_tokenizer",
        "sampling_rate": sizes.get("output_sample_rate") or sizes["sample_rate"],
        "params": sizes,
    },
    renamed=((r"\.fc", ".mlp.fc"),),
    beside=_unread(
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
        ((r"\.(q|k|v|proj_out)\.weight$", _pointwise),),
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
    beside=_unread(
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
        beside=_unread("module.wav_proj.weight"),
    ),
    "causal_dac": _CAUSAL_DAC,
    "dac": _DAC,
    "ear_tts": Codec(
        Naming(
            (
                (r"^codebooks~(\d+)\.entries$", r"prvq.mus_list.\1"),
                (r"^layers\.", "decoder.layers."),
            ),
            ((r"\.pwconv\d\.weight$", _pointwise),),
        ),
        _ear_tts_document,
        renamed=(("^", _EAR_TTS),),
        beside=_unread(
            f"{_EAR_TTS}encoder.layers.0.weight",
            f"{_EAR_TTS}prvq._variance_list.0.variance",
            "tts_model.tts_model.embed.weight",
        ),
    ),
    "higgs": _HIGGS,
    "lfm2_audio": Codec(
        Naming(((r"^emb\.", "emb.emb."), (r"\.o_proj\.", ".out_proj."))),
        lambda sizes: {"model_type": "lfm2", "vocab_size": 65536, "use_pos_enc": True, **sizes},
        beside=_unread("lfm.embed_tokens.weight", "istft.window"),
    ),
    "mimi": _MIMI,
    "moss": _moss(_MOSHI_1),
    "moss_stereo": _moss(
        (
            *_MOSHI_LAYERS,
            (r"\.qkv_proj\.", ".in_proj."),
            (r"\.o_proj\.", ".out_proj."),
            (r"\.mlp\.fc1\.", ".ffn.0."),
            (r"\.mlp\.fc2\.", ".ffn.2."),
        )
    ),
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
        beside=_unread("quantizer.project_in.bias", "fc_encoder.bias"),
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
        beside=_unread("encoder.layers.0.conv.bias"),
    ),
    "qwen3_tts": _qwen3(
        "decoder.",
        lambda sizes: {
            "model_type": "qwen3_tts_tokenizer_12hz",
            "decoder_config": {**sizes, "layer_scale_initial_scale": 0.01},
            "encoder_config": {"hidden_size": 1},
            "output_sample_rate": 24000,
        },
        "encoder.layers.0.weight",
    ),
    "qwen3_omni": _QWEN3_OMNI,
    "snac": _SNAC,
    "snac_attention": _SNAC,
    "vibevoice": _VIBEVOICE,
    "voxcpm": Codec(
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
    ),
    "wavtokenizer": _WAVTOKENIZER,
    "xy_tokenizer": _XY_TOKENIZER,
}
# Further formats of the same codecs.
FORMATS: dict[str, Codec] = {
    "causal_dac_of_fish": _FISH,
    "dac_of_descript": Descript(
        _PACKAGE,
        weights="weights.pth",
        fill=fill_dac,
        beside=_unread("encoder.block.0.bias"),
    ),
    "fish_s1": replace(
        _FISH,
        document=lambda sizes: {"model_type": "dual_ar", "dim": 1024, "n_layer": 28, **sizes},
        renamed=(("^", "generator."),),
        beside=_unread("discriminator.model.0.weight"),
        wrapper="state_dict",
        golden="causal_dac_of_fish",
    ),
    "higgs_first_release": _HIGGS_FIRST,
    "mimi_of_moshi": _MOSHI,
    "mimi_pickle": replace(_MIMI, weights="pytorch_model.bin", golden="mimi"),
    "moshi_older_names": replace(
        _MOSHI,
        renamed=((r"in_projs\.0\.weight$", "in_proj_weight"), (r"out_projs\.0\.", "out_proj.")),
        golden="mimi_of_moshi",
    ),
    "nanocodec_compressed": replace(_NANOCODEC, packed=_packed("w:gz"), golden="nanocodec"),
    "nanocodec_unpacked": replace(_UNPACKED, weights="model_weights.safetensors"),
    "nanocodec_unpacked_pickle": _UNPACKED,
    "qwen3_omni_in_files": replace(
        _QWEN3_OMNI, shards=3, packed=_beside_an_unread_file, golden="qwen3_omni"
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
    "voxcpm_bare": replace(CODECS["voxcpm"], wrapper="", golden="voxcpm"),
    "voxcpm_safetensors": replace(
        CODECS["voxcpm"],
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
