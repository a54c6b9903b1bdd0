"""Step-Audio2's estimator: what public code computes, and in chunks what the whole gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.family_golden import FamilyGolden
from tests.support.kept_memory import KeptMemory
from tests.support.random_weights import fill
from token2wav.flow.masks import BlockMask, attention_bias
from token2wav.flow.noise import FlowNoise
from token2wav.networks.step_audio_dit import StepAudioDiT

BANDS, BLOCK, FRAMES = 6, 10, 34
ROUNDING = 1e-5


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_public_velocity(size: str) -> None:
    golden = FamilyGolden("stepaudio2", size)
    sizes = golden.sizes
    estimator = StepAudioDiT(80, sizes["channels"], sizes["heads"], sizes["dim_head"], sizes["layers"][0])
    speaker = nn.Linear(192, 80)
    parts = {"decoder": nn.ModuleDict({"estimator": estimator}), "spk_embed_affine_layer": speaker}
    fill(nn.ModuleDict(parts))  # weights go by names
    mu = golden["mu_full"][None]
    prompt = golden["prompt_feat"].T[None]
    conditions = (
        mu,
        speaker(F.normalize(golden["embedding"][None])),
        F.pad(prompt, (0, mu.shape[2] - prompt.shape[2])),
    )
    mu, speakers, cond = (torch.cat((value, torch.zeros_like(value))) for value in conditions)
    noise = FlowNoise(80).window(0, mu.shape[2]).expand(2, -1, -1)
    velocity = estimator.velocity(noise, mu, speakers, cond, estimator.modulation(torch.tensor([0.3])), None)
    torch.testing.assert_close(velocity, golden["velocity_full"], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def estimator() -> StepAudioDiT:
    return fill(StepAudioDiT(BANDS, 16, heads=2, dim_head=4, layers=3))


def test_chunks_give_the_whole(estimator: StepAudioDiT) -> None:
    x, mu, cond = (torch.randn(2, BANDS, FRAMES) for _ in range(3))
    speaker, modulation = torch.randn(2, BANDS), estimator.modulation(torch.tensor([0.3]))
    bias = attention_bias(BlockMask(BLOCK).whole(FRAMES))
    whole = estimator.velocity(x, mu, speaker, cond, modulation, bias)
    memory, pieces = KeptMemory(estimator.convolutions, rows=2), []
    for start in range(0, FRAMES, BLOCK):
        piece, own_mu, own_cond = (value[:, :, start : start + BLOCK] for value in (x, mu, cond))
        pieces.append(estimator.velocity(piece, own_mu, speaker, own_cond, modulation, None, memory))
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, atol=ROUNDING, rtol=0)
    assert len(memory.keys) == 3
    assert len(memory.tails) == 2 * 3
