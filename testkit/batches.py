"""Several utterances in one batch, with all tokens available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav import StreamConfig, Token2WavError, UtteranceOptions
from token2wav.serving.chunking import Chunker
from token2wav.serving.pipeline import Pipeline
from token2wav.stages.stage import FlowStage
from token2wav.voice import Voice

Tokens = NDArray[Any]  # int32 tokens, or float32 latents

WHOLE_BLOCKS = StreamConfig(first_tokens=0)  # so that the audio does not depend on how tokens come


def spoken_together(
    pipeline: Pipeline,
    utterances: Sequence[tuple[Voice, Tokens, int | UtteranceOptions]],
    stagger: int = 0,
) -> list[NDArray[np.float32]]:
    """Returns the audio (n,) of utterances that run in one batch: voice, tokens, and ODE steps or
    all options.

    Utterance i begins in round `stagger` * i. An utterance that has ended is closed at once.
    """
    requests = [
        pipeline.utterance(voice, UtteranceOptions(steps) if isinstance(steps, int) else steps)
        for voice, _, steps in utterances
    ]
    audio: list[list[NDArray[np.float32]]] = [[] for _ in requests]
    waiting, running, rounds = list(range(len(requests))), list[int](), 0
    while waiting or running:
        while waiting and stagger * waiting[0] <= rounds:
            running.append(waiting.pop(0))
            pipeline.open(requests[running[-1]])
            requests[running[-1]].chunker.push(utterances[running[-1]][1], end=True)
        chunks = pipeline.advance([requests[index] for index in running])
        for index, chunk in zip(running, chunks, strict=True):
            assert not isinstance(chunk, Token2WavError)
            audio[index] += [] if chunk is None else [chunk.audio]
            requests[index].chunker.finish_chunk()
        ended = [index for index in running if not requests[index].chunker.next_chunk]
        for index in ended:
            running.remove(index)
            pipeline.close(requests[index])
        rounds += 1
    return [np.concatenate(pieces) for pieces in audio]


def mels_together(
    engine: FlowStage[Any], utterances: Sequence[tuple[int, Chunker, Tokens]]
) -> list[NDArray[np.float32]]:
    """Returns the mels (bands, frames) of open streams of a flow engine, computed together.

    It works as `spoken_together`. A mel includes the frames that are computed for the prompt.
    """
    for _, chunker, tokens in utterances:
        chunker.push(tokens, end=True)
    mels: list[list[NDArray[np.float32]]] = [[] for _ in utterances]
    while running := [
        (index, handle, chunk)
        for index, (handle, chunker, _) in enumerate(utterances)
        if (chunk := chunker.next_chunk) is not None
    ]:
        chunk_mels = engine.advance([(handle, chunk) for _, handle, chunk in running])
        for (index, _, _), mel in zip(running, chunk_mels, strict=True):
            mels[index].append(mel.cpu().numpy())
            utterances[index][1].finish_chunk()
    for handle, _, _ in utterances:
        engine.close(handle)
    return [np.concatenate(pieces, axis=1) for pieces in mels]
