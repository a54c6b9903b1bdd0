"""Flow and vocoder as stages of the ensemble: they turn a batch of chunks into mel or audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.errors import EngineError, StreamClosedError
from token2wav.execution import stages
from token2wav.execution.stages import FlowChunk, MelChunk
from token2wav.serving.audio_output import AudioChunk, AudioFormat, AudioOutput
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


@dataclass(frozen=True, eq=False)
class VocoderContent:
    """Input of the vocoder for a chunk.

    Attributes:
        chunk: mel.
        audio_format: what the client of its stream wants to be sent.
    """

    chunk: MelChunk
    audio_format: AudioFormat


@dataclass(frozen=True)
class VocoderState:
    """State of a stream in the vocoder.

    Attributes:
        handle: number of the stream in the engine.
        output: makes of its audio what is sent.
    """

    handle: int
    output: AudioOutput


class FlowStage:
    """Stage that turns tokens into mel, (frames, bands), without what is not to be heard.

    Args:
        engine: computes the mel.
        frames_per_token: mel frames per token.
    """

    def __init__(self, engine: stages.FlowStage, frames_per_token: int) -> None:
        self._engine = engine
        self._frames_per_token = frames_per_token

    def open(self, content: FlowContent) -> int:
        if content.voice is None:
            raise StreamClosedError("stream: its first chunk came without a voice")
        return self._engine.open(content.voice, content.steps)

    def advance(self, batch: Sequence[tuple[int, FlowContent]]) -> list[Output | EngineError]:
        mels = self._engine.advance([(state, content.chunk) for state, content in batch])
        return [
            _finite(mel[:, self._frames_per_token * content.chunk.skip :].T, "mel")
            for (_, content), mel in zip(batch, mels, strict=True)
        ]

    def close(self, state: int) -> None:
        self._engine.close(state)


class VocoderStage:
    """Stage that turns mel into chunks of audio; None where nothing of it is to be sent yet.

    Args:
        engine: computes the audio.
        output: makes the output of a stream.
    """

    def __init__(self, engine: stages.VocoderStage, output: Callable[[AudioFormat], AudioOutput]) -> None:
        self._engine = engine
        self._output = output

    def open(self, content: VocoderContent) -> VocoderState:
        output = self._output(content.audio_format)
        return VocoderState(self._engine.open(), output)

    def advance(self, batch: Sequence[tuple[VocoderState, VocoderContent]]) -> list[AudioChunk | EngineError | None]:
        audio = self._engine.advance([(state.handle, content.chunk) for state, content in batch])
        results: list[AudioChunk | EngineError | None] = []
        for (state, content), samples in zip(batch, audio, strict=True):
            new = _finite(samples, "audio")
            results.append(new if isinstance(new, EngineError) else state.output.take(new, last=content.chunk.last))
        return results

    def close(self, state: VocoderState) -> None:
        self._engine.close(state.handle)


def _finite(values: torch.Tensor, what: str) -> Output | EngineError:
    array = values.cpu().numpy()
    if not np.isfinite(array).all():
        return EngineError(f"engine: the model produced NaN or infinite {what}")
    return array
