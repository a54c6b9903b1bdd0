"""Attention blocks of other sizes, which the YAML of the model sets."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from testkit.models.golden import TINY
from testkit.models.tiny_model import ODE_STEPS
from testkit.models.yaml_edits import edit_yaml
from testkit.utterances import Mel, Tokens, a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, FlowStream, Parts
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver


def with_blocks(folder: Path, block_tokens: int) -> Token2Wav:
    shutil.copytree(TINY, folder)
    edit_yaml(folder, "(?m)^chunk_size: 25", f"chunk_size: {block_tokens}")
    return Token2Wav.load(
        folder,
        stream=StreamConfig(steps=(ODE_STEPS,)),
        runtime=RuntimeConfig(device="cpu", cache_mib=64),
    )


def mask_frame_by_frame(frames: int, block: int) -> torch.Tensor:
    """Returns the mask in which a frame attends to its own block and to all earlier blocks."""
    mask = torch.zeros(frames, frames, dtype=torch.bool)
    for query in range(frames):
        mask[query, : (query // block + 1) * block] = True
    return mask


def brute_force(
    flow: Flow,
    noise: FlowNoise,
    solver: EulerSolver,
    tokens: Tokens,
    voice: Voice,
    mask: torch.Tensor,
) -> Mel:
    """Computes the mel of prompt and tokens in one call under any mask, without an engine."""
    all_tokens = np.concatenate((voice.prompt_tokens, tokens))
    with torch.inference_mode():
        mu = flow.mu(torch.tensor(all_tokens)[None])[0]
        cond = torch.zeros_like(mu)
        cond[:, : len(voice.prompt_mel)] = torch.tensor(voice.prompt_mel).T
        speaker = flow.speaker(torch.tensor(voice.speaker_embedding))
        start = noise.window(0, mu.shape[1])
        mel = solver.solve(start[None], mu[None], speaker[None], cond[None], mask)[0]
    return mel[:, len(voice.prompt_mel) :].numpy()


@pytest.mark.parametrize("block_tokens", [10, 50])
def test_another_block_size(parts: Parts, tmp_path: Path, block_tokens: int) -> None:
    """A stream equals the whole under the mask of such blocks, with the same weights."""
    voice, tokens = a_voice(41), some_tokens(93)
    model = with_blocks(tmp_path / "model", block_tokens)
    mask = mask_frame_by_frame(2 * (41 + 93), 2 * block_tokens)
    whole = brute_force(parts.flow, parts.flow_noise, parts.solver, tokens, voice, mask)
    assert off(model.mel(tokens, voice), whole) <= MEL
    utterance = FlowStream(model.pipeline.flow, voice, model.config)
    for portion in portions(tokens, [7, 30]):
        utterance.push(portion)
    assert off(utterance.finish().mel, whole) <= MEL
    utterance.close()
    assert len(model.synthesize(tokens, voice)) == 960 * 93


def test_full_attention_is_that_of_every_block_size(parts: Parts, tmp_path: Path) -> None:
    voice, tokens = a_voice(41), some_tokens(93)
    everyone = torch.ones(2 * (41 + 93), 2 * (41 + 93), dtype=torch.bool)
    whole = brute_force(parts.flow, parts.flow_noise, parts.solver, tokens, voice, everyone)
    for block_tokens in (25, 10):
        model = with_blocks(tmp_path / str(block_tokens), block_tokens)
        assert off(model.mel(tokens, voice, streaming=False), whole) <= MEL
