"""Random voices and tokens, streams that use these, and the comparison of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from testkit.batches import mels_together
from token2wav import AudioChunk, StreamConfig, Token2Wav, Voice
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule

VOCABULARY = 6561

Tokens = NDArray[Any]  # int32 tokens, or float32 latents
Mel = NDArray[np.float32]
Audio = NDArray[np.float32]
Utterance = tuple[Tokens, Voice]


def a_voice(prompt_tokens: int, seed: int = 0) -> Voice:
    """Returns a voice with a random prompt, for a model with two mel frames a token."""
    random = np.random.default_rng((prompt_tokens, seed))
    return Voice(
        random.integers(0, VOCABULARY, prompt_tokens),
        random.standard_normal((2 * prompt_tokens, 80)).astype(np.float32),
        random.standard_normal(192).astype(np.float32),
    )


def some_tokens(count: int, seed: int = 0, *, vocabulary: int = VOCABULARY) -> Tokens:
    return np.random.default_rng((count, seed)).integers(0, vocabulary, count).astype(np.int32)


def portions(tokens: Tokens, sizes: Sequence[int]) -> list[Tokens]:
    """Cuts tokens into portions of the given sizes, in a cycle."""
    parts, at, turn = [], 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        parts.append(tokens[at : at + size])
        at, turn = at + size, turn + 1
    return parts


def random_portions(tokens: NDArray[Any], seed: int) -> list[NDArray[Any]]:
    """Cuts tokens into 2 + 3 * seed portions, some of which may be empty."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(tokens) + 1, size=1 + 3 * seed))
    return np.split(tokens, cuts)


def off(value: Any, reference: Any) -> float:
    """Returns the largest difference between two arrays, or between a tensor and one on the CPU."""
    assert value.shape == reference.shape
    if isinstance(value, torch.Tensor):
        value = value.cpu()
    return float(abs(value - reference).max())


def chunks_of(
    model: Token2Wav, parts: Iterable[Tokens], voice: Voice | None = None
) -> list[AudioChunk]:
    """Streams an utterance in portions of tokens."""
    with model.stream(voice) as stream:
        return [chunk for part in parts for chunk in stream.push(part)] + stream.finish()


def joined(chunks: Iterable[AudioChunk]) -> Audio:
    return np.concatenate([chunk.audio for chunk in chunks])


def streamed(model: Token2Wav, parts: Iterable[Tokens], voice: Voice | None = None) -> Audio:
    """Returns the audio of an utterance that is streamed in portions of tokens."""
    return joined(chunks_of(model, parts, voice))


def streamed_mels(model: Token2Wav, *utterances: Utterance) -> list[Mel]:
    """Returns the mels of utterances with chunks that run in one batch."""
    flow, schedule = model.pipeline.flow, HopSchedule.of(StreamConfig(), model.config)
    streams = [
        (flow.open(voice), Chunker(voice.prompt_tokens, model.config, schedule), tokens)
        for tokens, voice in utterances
    ]
    mels = mels_together(flow, streams)
    ratio = model.config.token_mel_ratio
    return [
        mel[:, -ratio * len(tokens) :] for mel, (tokens, _) in zip(mels, utterances, strict=True)
    ]
