"""Flow and vocoder as stages of the ensemble: they turn a batch of chunks into mel or audio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.errors import EngineError, StreamClosedError
from token2wav.execution.stages import FlowChunk, FlowEngine, MelChunk, VocoderEngine
from token2wav.voice import Voice

Output = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FlowContent:
    """Input of the flow for a chunk.

    Attributes:
        chunk: tokens and their positions.
        voice: prompt and speaker with the first chunk of a stream; else None.
        steps: number of ODE steps; 0 for the usual number.
    """

    chunk: FlowChunk
    voice: Voice | None
    steps: int = 0


@dataclass(frozen=True)
class FlowState:
    """State of a stream in the flow.

    Attributes:
        handle: number of the stream in the engine.
        prompt_tokens: number of prompt tokens of its voice.
    """

    handle: int
    prompt_tokens: int


class FlowStage:
    """Stage that turns tokens into mel, (frames, bands), without the prompt's.

    Args:
        engine: computes the mel.
        frames_per_token: mel frames per token.
    """

    def __init__(self, engine: FlowEngine, frames_per_token: int) -> None:
        self._engine = engine
        self._frames_per_token = frames_per_token

    def open(self, content: FlowContent) -> FlowState:
        if content.voice is None:
            raise StreamClosedError("stream: its first chunk came without a voice")
        return FlowState(self._engine.open(content.voice, content.steps), len(content.voice.prompt_tokens))

    def advance(self, batch: Sequence[tuple[FlowState, FlowContent]]) -> list[Output | EngineError]:
        mels = self._engine.advance([(state.handle, content.chunk) for state, content in batch])
        results = []
        for (state, content), mel in zip(batch, mels, strict=True):
            prompt_frames = max(0, state.prompt_tokens - content.chunk.start) * self._frames_per_token
            results.append(_finite(mel[:, prompt_frames:].T, "mel"))
        return results

    def close(self, state: FlowState) -> None:
        self._engine.close(state.handle)


class VocoderStage:
    """Stage that turns mel into audio, (samples,).

    Args:
        engine: computes the audio.
    """

    def __init__(self, engine: VocoderEngine) -> None:
        self._engine = engine

    def open(self, content: MelChunk) -> int:
        return self._engine.open()

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[Output | EngineError]:
        return [_finite(audio, "audio") for audio in self._engine.advance(batch)]

    def close(self, state: int) -> None:
        self._engine.close(state)


def _finite(values: torch.Tensor, what: str) -> Output | EngineError:
    array = values.cpu().numpy()
    if not np.isfinite(array).all():
        return EngineError(f"engine: the model produced NaN or infinite {what}")
    return array
