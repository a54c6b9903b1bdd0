"""Estimators and encoders of all families against the results of their public code, and in half
precision; the conformer's table of distances, and the bias of a mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.conformer import Conformer, RelativeAttention, SequenceAttention
from token2wav.networks.dit import DiT
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.noise import FlowNoise
from token2wav.networks.step_audio_dit import StepAudioDiT
from token2wav.networks.unet import UNet
from token2wav.published.sizes import ConformerConfig, EstimatorConfig, UNetConfig

TOLERANCE = 2e-5  # of both velocities, with values up to 5
TIME, END = torch.tensor([0.3]), torch.tensor([0.8])
# Family, kind of its tensors, and block of its mask in tokens.
KINDS = [
    ("cosyvoice2", "full", 0),
    ("cosyvoice2", "streaming", 25),
    ("stepaudio2", "full", 0),
    ("chatterbox", "full", 0),
    ("chatterbox", "meanflow", 0),
]


def networks(golden: FamilyGolden, kind: str) -> nn.ModuleDict:
    """Networks of a flow under their public names, which select their weights."""
    size = golden.sizes
    width = (size["encoder"], size["encoder_heads"], size["encoder_units"])
    encoder = Conformer(ConformerConfig(*width, *size["encoder_layers"]), lookahead=3, ratio=2)
    width = (size["channels"], size["heads"], size["dim_head"])
    if golden.family == "stepaudio2":
        estimator: nn.Module = StepAudioDiT(80, *width, size["layers"][0])
    else:
        unet = UNetConfig(*width, *size["layers"])
        estimator = UNet(80, unet, 50, mean_flow=kind == "meanflow")
    parts = {
        "input_embedding": nn.Embedding(6561, size["encoder"]),
        "spk_embed_affine_layer": nn.Linear(192, 80),
        "encoder": encoder,
        "encoder_proj": nn.Linear(size["encoder"], 80),
        "decoder": nn.ModuleDict({"estimator": estimator}),
    }
    return fill(nn.ModuleDict(parts))


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize(("family", "kind", "block"), KINDS)
def test_public_conditions_and_velocities(family: str, kind: str, block: int, size: str) -> None:
    golden = FamilyGolden(family, size)
    flow = networks(golden, kind)
    tokens = torch.cat((golden["prompt_token"], golden["token"]))
    attention = SequenceAttention(BlockGrid(block) if block else None)
    encoder: Any = flow["encoder"]
    embedded = encoder.embed(flow["input_embedding"](tokens[None]))
    mu = flow["encoder_proj"](encoder(embedded, attention)).transpose(1, 2)
    torch.testing.assert_close(mu[0], golden[f"mu_{kind}"], atol=TOLERANCE, rtol=0)
    prompt = golden["prompt_feat"].T[None]
    cond = F.pad(prompt, (0, mu.shape[2] - prompt.shape[2]))
    speaker = flow["spk_embed_affine_layer"](F.normalize(golden["embedding"][None]))
    mu, speakers, cond = (
        torch.cat((value, torch.zeros_like(value))) for value in (mu, speaker, cond)
    )
    estimator: Any = flow.get_submodule("decoder.estimator")
    modulation = (
        estimator.modulation(TIME, END) if kind == "meanflow" else estimator.modulation(TIME)
    )
    bias = attention_bias(block_mask(BlockGrid(2 * block), mu.shape[2])) if block else None
    noise = FlowNoise(80).window(0, mu.shape[2]).expand(2, -1, -1)
    conditions = estimator.project_conditions(mu, speakers, cond)
    velocity = estimator.velocity(noise, conditions, modulation, bias)
    torch.testing.assert_close(velocity, golden[f"velocity_{kind}"], atol=TOLERANCE, rtol=0)
    estimator.halve()
    rounded = estimator.velocity(noise, conditions, modulation, bias)
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - velocity).abs().max()) < 0.01 * float(velocity.abs().max())


@pytest.mark.parametrize("kind", ["streaming", "full"])
def test_public_velocity_with_a_long_skip_connection_and_in_half_precision(kind: str) -> None:
    golden = FamilyGolden("cosyvoice3", "long_skip")
    estimator = fill(DiT(EstimatorConfig(**golden.sizes)))
    inputs = {name: golden[name] for name in ("x", "mask", "mu", "t", "spks", "cond")}
    exact = estimator(**inputs, streaming=kind == "streaming")
    torch.testing.assert_close(exact, golden[f"velocity_{kind}"], atol=TOLERANCE, rtol=0)
    estimator.halve()
    rounded = estimator(**inputs, streaming=kind == "streaming")
    assert (rounded.dtype, estimator.score_dtype) == (torch.float32, torch.float16)
    assert 0 < float((rounded - exact).abs().max()) < 0.01 * float(exact.abs().max())


def test_the_table_of_distances_grows_at_both_ends() -> None:
    """A short chunk late in a stream comes before a long one early in another stream."""
    attention = fill(RelativeAttention(16, heads=2))
    for nearest, farthest in ((-4, 9), (-4, 100), (-30, 30), (-300, 5)):
        expected = attention._project(farthest, nearest)
        torch.testing.assert_close(attention._projected(nearest, farthest), expected)


def test_scores_that_are_not_allowed_get_no_weight() -> None:
    """Not even in float16, and a query in padding, without any key, gets no NaN."""
    allowed = torch.tensor([[True, False], [False, False]])
    weights = (torch.randn(2, 2) + attention_bias(allowed)).half().softmax(dim=1)
    assert weights[0].tolist() == [1.0, 0.0]
    assert weights.isfinite().all()
