"""Chunk options at inference: left chunks without the prompt, and chunks of another size than the model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.execution.rig import (
    MEL,
    FlowStream,
    Mel,
    Parts,
    Tokens,
    a_voice,
    flow_mel,
    off,
    portions,
    some_tokens,
)
from tests.support.golden import TINY
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver


def mask_frame_by_frame(frames: int, block: int, left: int) -> torch.Tensor:
    """A frame of chunk c sees chunks max(0, c - left) to c; all before it if left is negative."""
    mask = torch.zeros(frames, frames, dtype=torch.bool)
    for query in range(frames):
        chunk = query // block
        first = 0 if left < 0 else max(0, chunk - left)
        mask[query, first * block : (chunk + 1) * block] = True
    return mask


def brute_force(
    flow: Flow, noise: FlowNoise, solver: EulerSolver, tokens: Tokens, voice: Voice, mask: torch.Tensor
) -> Mel:
    """Mel of prompt and tokens in one call under any mask, without an engine."""
    everything = np.concatenate((voice.prompt_tokens, tokens))
    with torch.inference_mode():
        mu = flow.condition(torch.tensor(everything))
        cond = torch.zeros_like(mu)
        cond[:, : len(voice.prompt_mel)] = torch.tensor(voice.prompt_mel).T
        speaker = flow.speaker(torch.tensor(voice.speaker_embedding))
        start = noise.window(0, mu.shape[1])
        mel = solver.solve(start[None], mu[None], speaker[None], cond[None], mask)[0]
    return mel[:, len(voice.prompt_mel) :].numpy()


@pytest.mark.parametrize(("left", "prompt"), [(0, 80), (1, 0), (1, 80), (8, 30)])
def test_left_chunks_without_the_prompt(parts: Parts, left: int, prompt: int) -> None:
    voice, tokens = a_voice(prompt), some_tokens(130)
    mask = mask_frame_by_frame(2 * (prompt + 130), 50, left)
    whole = brute_force(parts.flow, parts.flow_noise, parts.solver, tokens, voice, mask)
    stream = StreamConfig(left_blocks=left, keep_prompt=False)
    for engine in (
        parts.incremental(left_blocks=left, keep_prompt=False),
        parts.recompute(left_blocks=left, keep_prompt=False),
    ):
        assert off(flow_mel(parts, engine, portions(tokens, [17]), voice, stream), whole) <= MEL
        assert off(engine.whole(tokens, voice, streaming=True).numpy(), whole) <= MEL


def test_prompt_leaves_the_view(parts: Parts) -> None:
    """The last chunks of two voices that differ in their prompt alone are the same."""
    tokens, stream = some_tokens(160), StreamConfig(left_blocks=0, keep_prompt=False)
    engine = parts.incremental(left_blocks=0, keep_prompt=False)
    voices = [a_voice(28, seed) for seed in (0, 1)]
    same_speaker = Voice(voices[1].prompt_tokens, voices[1].prompt_mel, voices[0].speaker_embedding)
    # Only the position convolutions, 60 frames back, cross the border of a block.
    ends = [flow_mel(parts, engine, [tokens], voice, stream)[:, -40:] for voice in (voices[0], same_speaker)]
    assert off(*ends) <= MEL


@pytest.mark.parametrize("block_tokens", [10, 50])
def test_another_chunk_size_at_inference(parts: Parts, block_tokens: int) -> None:
    """A stream under `stream.block_tokens` is the whole under the mask of such chunks, from the same weights."""
    voice, tokens = a_voice(41), some_tokens(93)
    config = StreamConfig(block_tokens=block_tokens)
    model = Token2Wav.load(TINY, stream=config, runtime=RuntimeConfig(device="cpu", cache_mib=64))
    mask = mask_frame_by_frame(2 * (41 + 93), 2 * block_tokens, -1)
    whole = brute_force(parts.flow, parts.flow_noise, parts.solver, tokens, voice, mask)
    assert off(model.mel(tokens, voice), whole) <= MEL
    utterance = FlowStream(model.pipeline.flow, voice, model.config, config)
    for portion in portions(tokens, [7, 30]):
        utterance.push(portion)
    assert off(utterance.finish().mel, whole) <= MEL
    utterance.close()
    assert len(model.synthesize(tokens, voice)) == 960 * 93


def test_full_attention_is_that_of_every_chunk_size(parts: Parts) -> None:
    voice, tokens = a_voice(41), some_tokens(93)
    everyone = torch.ones(2 * (41 + 93), 2 * (41 + 93), dtype=torch.bool)
    whole = brute_force(parts.flow, parts.flow_noise, parts.solver, tokens, voice, everyone)
    for block_tokens in (0, 10):
        runtime = RuntimeConfig(device="cpu", cache_mib=64)
        model = Token2Wav.load(TINY, stream=StreamConfig(block_tokens=block_tokens), runtime=runtime)
        assert off(model.mel(tokens, voice, streaming=False), whole) <= MEL
