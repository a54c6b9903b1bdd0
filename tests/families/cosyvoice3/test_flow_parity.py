"""Every stage from tokens to mel against the public implementation."""

from __future__ import annotations

import torch

from testkit.models.golden import GoldenSet
from testkit.utterances import off
from tests.families.cosyvoice3 import tolerances
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.masks import block_mask
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import EulerSolver
from token2wav.stages.recompute import RecomputeFlow


def all_tokens(golden: GoldenSet, flow: Flow) -> torch.Tensor:
    device = flow.spk_embed_affine_layer.weight.device
    return torch.cat((golden["in.prompt_token"][0], golden["in.token"][0].clamp(min=0))).to(device)


def estimator_inputs(golden: GoldenSet, flow: Flow) -> dict[str, torch.Tensor]:
    device = flow.spk_embed_affine_layer.weight.device
    return {
        name: golden[f"est.in.{name}"].to(device)
        for name in ("x", "mask", "mu", "t", "spks", "cond")
    }


def solver_of(flow: Flow) -> EulerSolver:
    return EulerSolver(flow.estimator, flow.config.n_timesteps, flow.config.inference_cfg_rate)


def test_estimator(golden: GoldenSet, flow: Flow) -> None:
    inputs = estimator_inputs(golden, flow)
    with torch.inference_mode():
        streaming = flow.estimator(**inputs, streaming=True)
        full = flow.estimator(**inputs, streaming=False)
    assert off(streaming, golden["est.out.streaming"]) <= tolerances.ESTIMATOR
    assert off(full, golden["est.out.nonstreaming"]) <= tolerances.ESTIMATOR


def test_padding_does_not_reach_the_frames_before_it(golden: GoldenSet, flow: Flow) -> None:
    inputs = estimator_inputs(golden, flow)
    with torch.inference_mode():
        alone = flow.estimator(**inputs, streaming=True)
        padded = {
            name: torch.nn.functional.pad(inputs[name], (0, 17), value=3.0)
            for name in ("x", "mu", "cond")
        }
        padded["mask"] = torch.nn.functional.pad(inputs["mask"], (0, 17))
        together = flow.estimator(**(inputs | padded), streaming=True)
    frames = alone.shape[2]
    assert off(together[..., :frames], alone.cpu()) <= tolerances.ESTIMATOR
    assert not together[..., frames:].any()


def test_whole_mel(
    golden: GoldenSet, config: CosyVoice3Config, flow: Flow, noises: tuple[FlowNoise, SourceNoise]
) -> None:
    engine = RecomputeFlow(config, flow, noises[0], {flow.config.n_timesteps: solver_of(flow)})
    streaming = engine.whole(golden.tokens, golden.voice, streaming=True)
    assert off(streaming, golden["flow.mel.streaming"][0]) <= tolerances.MEL
    full = engine.whole(golden.tokens, golden.voice, streaming=False)
    assert off(full, golden["flow.mel.nonstreaming"][0]) <= tolerances.MEL


def test_mel_of_an_unfinished_utterance(
    golden: GoldenSet, flow: Flow, noises: tuple[FlowNoise, SourceNoise]
) -> None:
    device = flow.spk_embed_affine_layer.weight.device
    mu = flow.mu(all_tokens(golden, flow)[None], last=False)[0]
    prompt = golden["in.prompt_feat"][0].T.to(device)
    cond = torch.zeros_like(mu)
    cond[:, : prompt.shape[1]] = prompt
    frames = mu.shape[1]
    mel = solver_of(flow).solve(
        noises[0].window(0, frames).to(device)[None],
        mu[None],
        golden["flow.spk"].to(device),
        cond[None],
        block_mask(BlockGrid(flow.estimator.block_frames), frames, device),
    )
    assert (
        off(mel[:, :, prompt.shape[1] :], golden["flow.mel.streaming_nofinalize"]) <= tolerances.MEL
    )
