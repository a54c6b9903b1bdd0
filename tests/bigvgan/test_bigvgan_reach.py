"""The reach is what the layers have, on both sides: one frame more changes something, none beyond it does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.bigvgan.rig import GOLDEN, SMALL, changed, tracer
from token2wav.bigvgan_config import BigVGANConfig
from token2wav.vocoder.bigvgan import BigVGAN
from token2wav.vocoder.bigvgan_reach import Reach, reach_frames

GOLDEN_CONFIG = BigVGANConfig.read(GOLDEN)
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
    "second kernel reaches further": changed(resblock_kernel_sizes=(11, 3), resblock_dilation_sizes=((1,), (1, 3, 15))),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_an_impulse_sounds_in_all_frames_within_reach_and_in_no_other(config: BigVGANConfig) -> None:
    reach = reach_frames(config)
    at = reach.right + 2
    mel = torch.zeros(1, config.num_mels, at + reach.left + 3, dtype=torch.float64)
    mel[..., at] = 1
    with torch.inference_mode():
        audio = tracer(config)(mel)[0, 0].view(-1, config.hop_size)  # (frames, hop)
    sounding = audio.amax(dim=1).nonzero().flatten().tolist()
    assert sounding == list(range(at - reach.right, at + reach.left + 1))


def test_golden_audio_changes_within_reach_only(bigvgan: BigVGAN, golden: dict[str, torch.Tensor]) -> None:
    reach, at, hop = reach_frames(bigvgan.config), 60, bigvgan.config.hop_size
    mel = golden["mel"].clone()
    mel[..., at] += 3
    with torch.inference_mode():
        moved = (bigvgan(mel) - bigvgan(golden["mel"]))[0, 0].abs()
    assert float(moved[: (at - reach.right) * hop].max()) == 0
    assert float(moved[(at + reach.left + 1) * hop :].max()) == 0
    assert float(moved[at * hop : (at + 1) * hop].max()) > 1e-3


def test_reaches_of_public_models() -> None:
    assert reach_frames(GOLDEN_CONFIG) == Reach(38, 38)
    base = dataclasses.replace(GOLDEN_CONFIG, upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4))
    assert reach_frames(base) == Reach(18, 18)
