"""Rates and sizes that follow from the published configuration of each codec.

The number of parameters guards the widths of all layers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from testkit.models.published_codecs import FURTHER, codec_configs
from testkit.tables import table
from token2wav import StreamConfig
from token2wav.assembly import family_for
from token2wav.published.registry import read_config

EXACT = StreamConfig(lookahead_frames=0)


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
    for name, files in FURTHER.items():
        folder = tmp_path_factory.mktemp("codec")
        if "file" in files:
            (folder / files["file"]).touch()
        if "document" in files:
            (folder / "config.json").write_text(json.dumps(files["document"]))
        read[name] = read_config(folder)
    return read


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_published_sizes(row: tuple[str, ...], configs: dict[str, Any]) -> None:
    name, *cells = row
    assert described(configs[name]) == tuple(cells)


def test_every_published_codec_has_a_row(configs: dict[str, Any]) -> None:
    assert [name for name, *_ in PUBLISHED] == list(configs)
