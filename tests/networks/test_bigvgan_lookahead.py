"""Look-ahead of all kinds of layers: frames within it change the audio, frames beyond it do not.

Pieces equal the whole.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from testkit.models.bigvgan import GOLDEN, SMALL, a_mel, changed, random_bigvgan, tracer
from token2wav.families.cosyvoice3.bigvgan import read_bigvgan
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.configs import BigVGANConfig
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

GOLDEN_CONFIG = read_bigvgan(GOLDEN)
CONFIGS = {
    "golden": GOLDEN_CONFIG,
    "small": SMALL,
    "single convolutions": changed(resblock="2"),
    "kernel equal to rate": changed(upsample_kernel_sizes=(4, 2)),
    "odd rates": changed(upsample_rates=(5, 3), upsample_kernel_sizes=(11, 5), hop_size=15),
    "rate of one": changed(upsample_rates=(1, 8), upsample_kernel_sizes=(3, 16)),
    "one short stage": changed(
        upsample_rates=(64,),
        upsample_kernel_sizes=(64,),
        hop_size=64,
        resblock_kernel_sizes=(1,),
        resblock_dilation_sizes=((1,),),
    ),
    "second kernel reaches further": changed(
        resblock_kernel_sizes=(11, 3), resblock_dilation_sizes=((1,), (1, 3, 15))
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_an_impulse_arrives_earlier_by_the_declared_delay(config: BigVGANConfig) -> None:
    bigvgan = tracer(config)
    at = bigvgan.lookahead_frames + 2
    mel = torch.zeros(1, config.num_mels, at + 3, dtype=torch.float64)
    mel[..., at] = 1
    with torch.inference_mode():
        audio = bigvgan(mel)[0, 0]
    assert int(audio.nonzero().min()) == at * config.hop_size - bigvgan.output_delay


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_pieces_equal_the_whole(config: BigVGANConfig) -> None:
    bigvgan = random_bigvgan(config)
    engine, mel = WaveformStage(bigvgan), a_mel(120, config.num_mels)
    first = bigvgan.lookahead_frames + 1
    handle, parts = engine.open(), mel.split([first, 13, 30, 77 - first], dim=1)
    audio = [
        engine.advance([(handle, FrameChunk(part, index == 3))])[0]
        for index, part in enumerate(parts)
    ]
    # 1.2e-5 on an Intel Xeon, below 1e-5 on an AMD EPYC.
    assert float((torch.cat(audio) - engine.whole(mel)).abs().max()) <= 2e-5


def test_golden_audio_changes_within_the_look_ahead_only(
    bigvgan: BigVGAN, bigvgan_golden: dict[str, torch.Tensor]
) -> None:
    at, hop = 60, bigvgan.config.hop_size
    mel = bigvgan_golden["mel"].clone()
    mel[..., at] += 3
    with torch.inference_mode():
        moved = (bigvgan(mel) - bigvgan(bigvgan_golden["mel"]))[0, 0].abs()
    assert float(moved[: at * hop - bigvgan.output_delay].max()) == 0
    assert float(moved[at * hop : (at + 1) * hop].max()) > 1e-3


def test_look_aheads_of_public_models() -> None:
    with torch.device("meta"):
        assert BigVGAN(GOLDEN_CONFIG).lookahead_frames == 38
        base = dataclasses.replace(
            GOLDEN_CONFIG, upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4)
        )
        assert BigVGAN(base).lookahead_frames == 18
