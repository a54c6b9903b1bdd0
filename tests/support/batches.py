"""Several utterances in one batch, all of whose tokens are there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from token2wav.streaming.pipeline import Pipeline
from token2wav.streaming.session import Session


def spoken_together(
    pipeline: Pipeline, sessions: Sequence[tuple[Session, NDArray[np.int32]]]
) -> list[NDArray[np.float32]]:
    """Audio (n,) of open sessions for their tokens, each round of chunks in one batch; they are closed then."""
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
