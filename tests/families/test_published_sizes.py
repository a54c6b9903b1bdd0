"""Rates and sizes that follow from the published configuration of each codec.

The number of parameters guards the widths of all layers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from testkit.models.codec_models import CODECS
from testkit.models.published_codecs import PUBLISHED as SIZES
from testkit.models.published_codecs import codec_configs
from testkit.tables import table
from token2wav import StreamConfig
from token2wav.assembly import family_for
from token2wav.published.registry import read_config


def patches(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def transformer(inputs: int, outputs: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "module_type": "Transformer",
        "input_dimension": inputs,
        "output_dimension": outputs,
        "d_model": width,
        "num_heads": heads,
        "num_layers": layers,
        "dim_feedforward": 4 * width,
        "layer_scale": 0.01,
    }


def moss_of_48_khz(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model_type": "moss-audio-tokenizer",
        "sample_rate": 48_000,
        "number_channels": 2,
        "downsample_rate": 3840,
        "decoder_kwargs": parts,
    }


def moss_nano() -> dict[str, Any]:
    parts = [patches(4)]
    for before, after in ((192, 768), (384, 768), (384, 768), (384, 240)):
        parts += [transformer(before, after, 256, 3, 4), patches(240 if after == 240 else 2)]
    return {**moss_of_48_khz(parts), "quantizer_kwargs": {"num_quantizers": 16}}


def moss_2() -> dict[str, Any]:
    """The patches make the samples of both channels. A transformer may have its own window."""
    outputs, seconds = [1280, 768, 768, 768, 768, 240], [None, None, 8, 4.0, 2, 1]
    inputs = [768, *(before // 2 for before in outputs[:-1])]
    parts: list[dict[str, Any]] = []
    for number, (before, after) in enumerate(zip(inputs, outputs, strict=True)):
        part = transformer(before, after, *((768, 12, 12) if number else (1280, 32, 20)))
        parts.append(part | {"context_duration": seconds[number]})
        parts.append(patches(240 if after == 240 else 2))
    return moss_of_48_khz(parts)


EXACT = StreamConfig(lookahead_frames=0)
RATES = [8, 5, 4, 2, 3]
# Files that tell what a folder holds, by the first word of a name.
FILES = {
    "Audio8": "codec.pth",
    "Fish": "codec.pth",
    "Moshi": "tokenizer-0123abcd-checkpoint125.safetensors",
    **dict.fromkeys(("VoxCPM", "VoxCPM2", "VoxCPM1.5", "VoxCPM-0.5B"), "audiovae.pth"),
}
# Documents of `config.json` beside those of `published_codecs.py`; None is a folder without one.
DOCUMENTS: dict[str, Any] = {
    "DAC 16 kHz": CODECS["dac"].document(
        {"sampling_rate": 16000, "downsampling_ratios": [2, 4, 5, 8], "n_codebooks": 12}
    ),
    "Higgs Audio, first": {
        "D": 256,
        "codebook_dim": 64,
        "vq_scale": 1,
        "ratios": RATES,
        "sample_rate": 24000,
        "bins": 1024,
        "n_q": 8,
    },
    "Higgs Audio, short": CODECS["higgs"].document(
        {
            "target_bandwidths": [0.5, 1, 1.5, 2],
            "acoustic_model_config": {"downsampling_ratios": RATES, "upsampling_ratios": RATES},
        },
    ),
    "Moshi": None,
    "SNAC 32 kHz": {**SIZES["SNAC 44.1 kHz"], "sampling_rate": 32000},
    "MOSS with null": {
        "model_type": "moss-audio-tokenizer",
        **dict.fromkeys(("number_channels", "decoder_kwargs", "quantizer_kwargs")),
    },
    "MOSS Nano": moss_nano(),
    "MOSS 2": moss_2(),
    "Audio8, other dim": {"model_type": "arktts", **SIZES["Audio8"], "dim": 896},
    "Audio8, no sizes": {"model_type": "arktts"},
    "Fish S1": {"model_type": "dual_ar", "codebook_size": 4096, "num_codebooks": 10},
    "Fish S2-Pro": {
        "model_type": "fish_qwen3_omni",
        "text_config": {"dim": 2560, "num_codebooks": 10},
    },
    "Fish, no file": None,
    "VibeVoice 0.5B": {
        "model_type": "vibevoice_streaming",
        "acoustic_tokenizer_config": {
            "vae_dim": 64,
            "decoder_ratios": [8, 5, 5, 4, 2, 2],
            "encoder_depths": "3-3-3-3-3-3-8",
        },
    },
    "VoxCPM2, no sizes": {"architecture": "VoxCPM2"},
    "VoxCPM1.5": CODECS["voxcpm"].document(
        {
            "encoder_dim": 64,
            "encoder_rates": [2, 3, 6, 7, 7],
            "latent_dim": 64,
            "decoder_dim": 2048,
            "decoder_rates": [7, 7, 6, 3, 2],
            "sample_rate": 44100,
        }
    ),
    "VoxCPM-0.5B": CODECS["voxcpm"].document({}),
    "VoxCPM with null": {"architecture": "voxcpm", "audio_vae_config": None},
}


def described(config: Any) -> tuple[str, ...]:
    """Returns the cells of a row."""
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    withheld = config.withheld_frames(StreamConfig())
    (first, longest), (exact, also_longest) = config.hops(StreamConfig()), config.hops(EXACT)
    assert network.missing_samples == config.missing_samples
    assert network.frame_samples == config.samples_per_token * config.channels
    assert getattr(config, "reach_frames", 0) in (0, network.lookahead_frames)
    assert (config.withheld_frames(EXACT), also_longest) == (0, longest)
    codes = "/".join(map(str, dict.fromkeys(config.tokens.codebook_sizes))) or "latents"
    return (
        f"{config.channels}x{config.sample_rate}",
        f"{config.token_frame_rate:.5g}x{config.samples_per_token}",
        f"{config.tokens.shape[0]}x{codes}",
        f"{config.missing_samples} {network.output_delay} {network.lookahead_frames} {withheld}",
        f"{config.block_tokens} {first} {exact} {longest}",
        str(sum(weight.numel() for weight in network.parameters())),
    )


# channels and sample rate; tokens per second and samples per token; codebooks and codes; samples
# that are missing and delayed, frames to look ahead and withheld; tokens of a block, of the first
# hop, of the first hop of an exact stream, and of the longest hop; parameters
PUBLISHED = table(
    """
Qwen3-TTS          | 1x24000 | 12.5x1920   | 16x2048      | 0 0 0 0     | 1 1 1 16    | 114028225
Qwen3-Omni         | 1x24000 | 12.5x1920   | 16x2048      | 555 555 0 0 | 1 1 1 16    | 216016577
Mimi               | 1x24000 | 12.5x1920   | 8x2048       | 0 0 0 0     | 1 1 1 16    | 44373537
Pocket TTS         | 1x24000 | 12.5x1920   | 32xlatents   | 0 0 0 0     | 1 1 1 16    | 10305313
NanoCodec          | 1x22050 | 12.5x1764   | 4x4032       | 0 0 0 0     | 1 1 1 16    | 31465805
DAC                | 1x44100 | 86.133x512  | 9x1024       | 0 4757 10 0 | 4 16 16 128 | 54247777
DAC 24 kHz         | 1x24000 | 75x320      | 32x1024      | 8 3141 10 8 | 3 12 15 96  | 52878689
Higgs Audio        | 1x24000 | 25x960      | 8x1024       | 0 9458 10 7 | 1 8 11 32   | 21557281
SNAC               | 1x24000 | 11.719x2048 | 7x4096       | 0 4757 3 2  | 1 3 4 16    | 13121025
SNAC 44.1 kHz      | 1x44100 | 14.355x3072 | 15x4096      | 0 5519 2 0  | 4 4 4 16    | 38485921
MOSS               | 1x24000 | 12.5x1920   | 32x1024      | 0 0 0 0     | 1 1 1 16    | 887413504
Audio8             | 1x44100 | 21.533x2048 | 10x4096/1024 | 0 0 0 0     | 1 1 1 32    | 130380129
EAR-TTS            | 1x22050 | 12.5x1764   | 31x1024      | 0 6 1 0     | 1 1 1 16    | 108098432
LFM2-Audio         | 1x24000 | 12.5x1920   | 8x2048       | 0 480 1 0   | 1 1 1 16    | 44976578
Audex              | 1x16000 | 50x320      | 1x65536      | 0 1280 4 0   | 2 6 6 64    | 613103616
NeuCodec           | 1x24000 | 50x480      | 1x65536      | 0 0 0 0     | 25 25 25 75 | 187639682
X-Codec 2          | 1x16000 | 50x320      | 1x65536      | 0 0 0 0     | 25 25 25 75 | 186983682
VibeVoice          | 1x24000 | 7.5x3200    | 64xlatents   | 0 0 0 0     | 1 1 1 8     | 343695969
VoxCPM2            | 1x48000 | 25x1920     | 64xlatents   | 0 0 0 0     | 1 1 1 32    | 45736449
WavTokenizer       | 1x24000 | 75x320      | 1x4096       | 0 0 0 0     | 20 20 20 120 | 65044482
XY-Tokenizer       | 1x32000 | 12.5x2560   | 8x1024       | 0 0 0 0     | 10 10 10 20 | 262364498
DAC 16 kHz         | 1x16000 | 50x320      | 12x1024      | 8 3141 10 8 | 2 10 12 64  | 52530529
Higgs Audio, first | 1x24000 | 25x960      | 8x1024       | 0 9458 10 7 | 1 8 11 32   | 21557281
Higgs Audio, short | 1x24000 | 25x960      | 8x1024       | 0 9458 10 7 | 1 8 11 32   | 21557281
Moshi              | 1x24000 | 12.5x1920   | 32x2048      | 0 0 0 0     | 1 1 1 16    | 56956449
SNAC 32 kHz        | 1x32000 | 10.417x3072 | 15x4096      | 0 5519 2 0  | 4 4 4 16    | 38485921
MOSS with null     | 1x24000 | 12.5x1920   | 32x1024      | 0 0 0 0     | 1 1 1 16    | 887413504
MOSS Nano          | 2x48000 | 12.5x3840   | 16x1024      | 0 0 0 0     | 1 1 1 16    | 11049728
MOSS 2             | 2x48000 | 12.5x3840   | 32x1024      | 0 0 0 0     | 1 1 1 16    | 1061980928
Audio8, other dim  | 1x44100 | 21.533x2048 | 10x4096/1024 | 0 0 0 0     | 1 1 1 32    | 130380129
Audio8, no sizes   | 1x44100 | 21.533x2048 | 10x4096/1024 | 0 0 0 0     | 1 1 1 32    | 130380129
Fish S1            | 1x44100 | 21.533x2048 | 10x4096/1024 | 0 0 0 0     | 1 1 1 32    | 184381793
Fish S2-Pro        | 1x44100 | 21.533x2048 | 10x4096/1024 | 0 0 0 0     | 1 1 1 32    | 184381793
Fish, no file      | 1x44100 | 21.533x2048 | 10x4096/1024 | 0 0 0 0     | 1 1 1 32    | 184381793
VibeVoice 0.5B     | 1x24000 | 7.5x3200    | 64xlatents   | 0 0 0 0     | 1 1 1 8     | 343695971
VoxCPM2, no sizes  | 1x48000 | 25x1920     | 64xlatents   | 0 0 0 0     | 1 1 1 32    | 45736449
VoxCPM1.5          | 1x44100 | 25x1764     | 64xlatents   | 0 0 0 0     | 1 1 1 32    | 42898177
VoxCPM-0.5B        | 1x16000 | 25x640      | 64xlatents   | 0 0 0 0     | 1 1 1 32    | 26907009
VoxCPM with null   | 1x16000 | 25x640      | 64xlatents   | 0 0 0 0     | 1 1 1 32    | 26907009
"""
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Configurations by the names of the rows."""
    read = dict[str, Any](codec_configs())
    for name, document in DOCUMENTS.items():
        folder = tmp_path_factory.mktemp("codec")
        if file := FILES.get(name.split()[0].rstrip(",")):
            (folder / file).touch()
        if document is not None:
            (folder / "config.json").write_text(json.dumps(document))
        read[name] = read_config(folder)
    return read


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_published_sizes(row: tuple[str, ...], configs: dict[str, Any]) -> None:
    name, *cells = row
    assert described(configs[name]) == tuple(cells)


def test_every_published_codec_has_a_row(configs: dict[str, Any]) -> None:
    assert [name for name, *_ in PUBLISHED] == list(configs)
