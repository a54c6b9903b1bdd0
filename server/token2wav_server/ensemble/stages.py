"""Flow and vocoder as stages of the ensemble, which compute mel or audio for a batch of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config import ServerConfig
from token2wav.config.model_config import StageName
from token2wav.errors import BackendError, ConfigError, StreamClosedError
from token2wav.model import Token2Wav
from token2wav.published.registry import read_config
from token2wav.serving.audio_output import AudioChunk, AudioOutput
from token2wav.stages.stage import FrameChunk, StreamOptions, TokenChunk
from token2wav.voice import Voice
from token2wav_server.ensemble.stage_streams import Label

Output = NDArray[np.float32]


class FlowContent(NamedTuple):
    """Input of the flow for a chunk.

    Attributes:
        voice: prompt and speaker, with the first chunk of a stream; None with all later chunks.
        steps: ODE steps; 0 for the default of the model.
    """

    chunk: TokenChunk
    voice: Voice | None
    steps: int = 0


class FlowStage:
    """Stage that computes mel, (frames, bands), from tokens.

    The mel omits the frames of the prompt, and the frames that an earlier chunk has returned.
    """

    def __init__(self, model: Token2Wav) -> None:
        self._flow, self._running = model.pipeline.flow, model.pipeline.running
        self._frames_per_token = model.config.token_mel_ratio

    def open(self, label: Label, content: FlowContent) -> int:
        if content.voice is None:
            raise StreamClosedError("stream: the first chunk of the stream has no voice")
        with self._running():
            return self._flow.open(content.voice, StreamOptions(content.steps))

    def advance(self, batch: Sequence[tuple[int, FlowContent]]) -> list[Output | BackendError]:
        with self._running():
            mels = self._flow.advance([(state, content.chunk) for state, content in batch])
            return [
                _finite(mel[:, self._frames_per_token * content.chunk.skip :].T)
                for (_, content), mel in zip(batch, mels, strict=True)
            ]

    def close(self, state: int) -> None:
        self._flow.close(state)


class _Vocoding(NamedTuple):
    """State of a stream in the vocoder stage.

    Attributes:
        output: trims, resamples, marks and encodes the audio.
    """

    handle: int
    output: AudioOutput


class VocoderStage:
    """Stage that computes chunks of audio from mel.

    The result for a chunk is None if no audio can be sent yet.
    """

    def __init__(self, model: Token2Wav, trim_silence_ms: float = 0.0) -> None:
        self._vocoder, self._running = model.pipeline.vocoder, model.pipeline.running
        self._output = partial(
            AudioOutput, model.config, trim_silence_ms=trim_silence_ms, mark=model.pipeline.mark
        )

    def open(self, label: Label, chunk: FrameChunk) -> _Vocoding:
        output = self._output(label.audio_format)  # first, because it may raise an error
        return _Vocoding(self._vocoder.open(), output)

    def advance(
        self, batch: Sequence[tuple[_Vocoding, FrameChunk]]
    ) -> list[AudioChunk | BackendError | None]:
        with self._running():
            audio = self._vocoder.advance([(state.handle, chunk) for state, chunk in batch])
            outputs = [samples.cpu().numpy() for samples in audio]
        return [
            state.output.result(samples, last=chunk.last)
            for (state, chunk), samples in zip(batch, outputs, strict=True)
        ]

    def close(self, state: _Vocoding) -> None:
        self._vocoder.close(state.handle)


def load_flow(folder: Path, server: ServerConfig) -> FlowStage:
    """Loads the flow stage of a model folder. `StageStreams` computes one batch at a time."""
    model = _load(folder, server, "flow")
    model.pipeline.limit_chunks(server.limits.batch_streams)
    return FlowStage(model)


def load_vocoder(folder: Path, server: ServerConfig) -> VocoderStage:
    """Loads the vocoder stage of a model folder."""
    return VocoderStage(_load(folder, server, "vocoder"), server.stream.trim_silence_ms)


def _load(folder: Path, server: ServerConfig, stage: StageName) -> Token2Wav:
    """Loads one stage of a model folder, and halves torch's threads.

    Flow and vocoder compute at the same time, in two processes. So each gets half of the cores.
    """
    config = read_config(folder)
    problem = None
    if stage not in config.stages:
        problem = f"has no {stage} stage, only {', '.join(config.stages)}"
    elif config.channels > 1:
        problem = f"has {config.channels} channels, but the ensemble has 1"
    if problem is not None:
        raise ConfigError(
            f"{folder}: {problem}; serve it without the ensemble, with the model token2wav"
        )
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    return Token2Wav.load(
        folder,
        stream=server.stream,
        runtime=server.runtime,
        streams=server.limits.streams,
        stages=(stage,),
    )


def _finite(mel: torch.Tensor) -> Output | BackendError:
    array = mel.cpu().numpy()
    if not np.isfinite(array).all():
        return BackendError("backend: the model produced NaN or infinite mel")
    return array
