"""Random utterances at 25 tokens and 50 frames a second, and functions that stream them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.support.batches import mels_together
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.serving.chunking import Chunker, HopSchedule

Utterance = tuple[NDArray[np.int32], Voice]


def a_voice(prompt: int, seed: int = 1) -> Voice:
    random = np.random.default_rng(seed)
    tokens, mel = random.integers(0, 6561, prompt), random.standard_normal((2 * prompt, 80))
    return Voice(tokens, mel.astype(np.float32), random.standard_normal(192).astype(np.float32))


def some_tokens(count: int) -> NDArray[np.int32]:
    return np.random.default_rng(count).integers(0, 6561, count).astype(np.int32)


def off(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Returns the largest difference."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max())


def streamed(
    model: Token2Wav, portions: Sequence[NDArray[np.int32]], voice: Voice
) -> NDArray[np.float32]:
    """Returns the audio of an utterance that is pushed in portions of tokens."""
    with model.stream(voice) as stream:
        chunks = [chunk for tokens in portions for chunk in stream.push(tokens)] + stream.finish()
    return np.concatenate([chunk.audio for chunk in chunks])


def streamed_mels(model: Token2Wav, *utterances: Utterance) -> list[NDArray[np.float32]]:
    """Returns the mels of utterances with chunks that run in one batch."""
    flow, schedule = model.pipeline.flow, HopSchedule.of(StreamConfig(), model.config)
    streams = [
        (flow.open(voice), Chunker(voice.prompt_tokens, model.config, schedule), tokens)
        for tokens, voice in utterances
    ]
    mels = mels_together(flow, streams)
    return [mel[:, -2 * len(tokens) :] for mel, (tokens, _) in zip(mels, utterances, strict=True)]
