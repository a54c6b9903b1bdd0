"""Several utterances in one batch, all of whose tokens are there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from token2wav.execution.stages import FlowEngine
from token2wav.streaming.pipeline import Pipeline
from token2wav.streaming.session import Session

Utterances = Sequence[tuple[Session, NDArray[np.int32]]]  # open sessions and all their tokens


def spoken_together(pipeline: Pipeline, sessions: Utterances) -> list[NDArray[np.float32]]:
    """Audio (n,) of every utterance, each round of chunks in one batch; they are closed then."""
    for session, tokens in sessions:
        session.push(tokens)
        session.end()
    audio: list[list[NDArray[np.float32]]] = [[] for _ in sessions]
    while running := [index for index, (session, _) in enumerate(sessions) if not session.done]:
        chunks = pipeline.advance([sessions[index][0] for index in running])
        for index, chunk in zip(running, chunks, strict=True):
            assert not isinstance(chunk, Exception)
            audio[index].append(chunk.audio)
    for session, _ in sessions:
        pipeline.close(session)
    return [np.concatenate(pieces) for pieces in audio]


def mels_together(engine: FlowEngine, sessions: Utterances) -> list[NDArray[np.float32]]:
    """As `spoken_together`, mels (bands, frames) of a flow engine alone, what chunks compute of prompts included."""
    for session, tokens in sessions:
        session.push(tokens)
        session.end()
    mels: list[list[NDArray[np.float32]]] = [[] for _ in sessions]
    while running := [index for index, (session, _) in enumerate(sessions) if not session.done]:
        chunks = [(index, chunk) for index in running if (chunk := sessions[index][0].next_chunk()) is not None]
        assert len(chunks) == len(running)
        batch = [(sessions[index][0].flow_handle, chunk) for index, chunk in chunks]
        for (index, chunk), mel in zip(chunks, engine.advance(batch), strict=True):
            mels[index].append(mel.cpu().numpy())
            sessions[index][0].sent(chunk, np.empty(0, np.float32))
    for session, _ in sessions:
        engine.close(session.flow_handle)
    return [np.concatenate(pieces, axis=1) for pieces in mels]
