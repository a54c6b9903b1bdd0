"""Every stage from tokens to mel against the public implementation."""

from __future__ import annotations

import pytest
import torch

from testkit.models.golden import GoldenSet
from testkit.utterances import off
from tests.families.cosyvoice3 import tolerances
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.layers.streaming import StreamStep
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import EulerSolver, solver_times, time_grid
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


def test_speaker_is_normalised_and_projected(golden: GoldenSet, flow: Flow) -> None:
    embedding = golden["in.embedding"][0].to(flow.spk_embed_affine_layer.weight.device)
    assert off(flow.speaker(embedding), golden["flow.spk"][0]) <= tolerances.CONDITIONING


def test_lookahead_of_a_finished_utterance(golden: GoldenSet, flow: Flow) -> None:
    mu = flow.mu(all_tokens(golden, flow)[None])[0]
    assert off(mu, golden["flow.mu.finalize"][0]) <= tolerances.CONDITIONING
    assert off(mu[:, ::2].T, golden["flow.pre_lookahead.finalize"][0]) <= tolerances.CONDITIONING


def test_lookahead_of_an_unfinished_utterance(golden: GoldenSet, flow: Flow) -> None:
    mu = flow.mu(all_tokens(golden, flow)[None], last=False)[0]
    assert off(mu[:, ::2].T, golden["flow.pre_lookahead.nofinalize"][0]) <= tolerances.CONDITIONING


@pytest.mark.parametrize("stops", [(25, 50, 75), (1, 2, 3, 40), (100,)], ids=str)
def test_conditions_of_chunks_equal_conditions_of_the_whole(
    golden: GoldenSet, flow: Flow, stops: tuple[int, ...]
) -> None:
    tokens, whole = all_tokens(golden, flow), golden["flow.mu.finalize"][0]
    zeros = {
        layer: torch.zeros(1, *spec.shape, device=tokens.device)
        for layer, spec in flow.state_specs().items()
    }
    step, start = StreamStep(zeros), 0
    for stop in (*stops, len(tokens)):
        last = stop == len(tokens)
        mu = flow.mu(tokens[None, start : stop if last else stop + 3], step, last=last)[0]
        assert off(mu, whole[:, 2 * start : 2 * stop]) <= tolerances.CONDITIONING
        start = stop


def test_time_grid_and_the_times_that_the_estimator_sees(golden: GoldenSet) -> None:
    assert off(time_grid(10), golden["cfm.t_span"]) == tolerances.EXACT
    assert off(solver_times(10)[0], golden["cfm.t_steps"]) == tolerances.EXACT


def test_noise_is_the_public_one(golden: GoldenSet, noises: tuple[FlowNoise, SourceNoise]) -> None:
    frames = golden["flow.mu.finalize"].shape[2]
    # From the seed, without the set's noise file: torch draws the same numbers wherever it runs.
    assert off(FlowNoise(80).window(0, frames), noises[0].window(0, frames)) == tolerances.EXACT


def test_estimator_inside(golden: GoldenSet, flow: Flow) -> None:
    inputs, dit = estimator_inputs(golden, flow), flow.estimator
    with torch.inference_mode():
        assert (
            off(dit.time_embed(inputs["t"]), golden["est.dbg.time_embed"]) <= tolerances.ESTIMATOR
        )
        x, cond, mu = (inputs[name].transpose(1, 2) for name in ("x", "cond", "mu"))
        embedded = dit.input_embed(x, dit.input_embed.project_conditions(cond, mu, inputs["spks"]))
        assert off(embedded, golden["est.dbg.input_embed"]) <= tolerances.ESTIMATOR
        frames = embedded.shape[1]
        rope = dit.rotary_embed(torch.arange(frames, device=embedded.device))
        bias = attention_bias(block_mask(BlockGrid(dit.block_frames), frames, embedded.device))
        modulation, _ = dit.modulation(inputs["t"])
        block = dit.transformer_blocks[0](embedded, modulation[0], rope, bias)
        assert off(block, golden["est.dbg.block0"]) <= tolerances.ESTIMATOR


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
