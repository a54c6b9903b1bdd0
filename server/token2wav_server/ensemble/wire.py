"""Stages as Triton models, the tensors that carry chunks between them, and reports of results.

Every tensor has a leading batch axis of 1, which Triton's dynamic batching needs.

If a stage cannot compute a chunk, it reports the error to the accumulator, and passes nothing on.
The accumulator answers the client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.config import ServerConfig
from token2wav.config.model_config import ModelConfig
from token2wav.errors import (
    BackendError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
    to_public_error,
)
from token2wav.published.registry import read_config
from token2wav.serving.audio_output import ENCODERS, AudioChunk, AudioFormat
from token2wav.serving.pipeline import Result
from token2wav.stages.stage import FrameChunk, TokenChunk
from token2wav.voice import FIELDS as VOICE_INPUTS
from token2wav.voice import Voice
from token2wav_server.ensemble.links import ACCUMULATOR, Mailbox, send
from token2wav_server.ensemble.stage_streams import Label, Part, Stage, StageStreams, ticker
from token2wav_server.ensemble.stages import FlowContent
from token2wav_server.model_process import read_environment
from token2wav_server.replies import outputs_of
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_tensors import array_of

_ERRORS: tuple[type[Token2WavError], ...] = (BackendError, LimitError, StreamClosedError)


class StageModel:
    """Triton model of one stage, which computes the batches of Triton's dynamic batcher.

    While the model computes a batch, Triton collects the requests of the next batch.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[Path, ServerConfig], Stage],
        read: Callable[[Any], Part],
    ) -> None:
        self._read = read
        folder, server = read_environment()
        self._streams = StageStreams(
            name,
            load(folder, server),
            server.limits.batch_streams,
            server.limits.open_seconds(read_config(folder).token_frame_rate),
        )
        self._mailbox = Mailbox(name, self._streams.close)
        self._stop_ticking = ticker(self._streams.check)

    def close(self) -> None:
        self._stop_ticking()
        self._mailbox.close()

    def execute(self, requests: list[Any]) -> None:
        self._streams.run(
            [part for request in requests if (part := self._part(request)) is not None]
        )

    def _part(self, request: Any) -> Part | None:
        """Reads the chunk of a request.

        A request that cannot be read is answered with an error, and the result is None. Only a
        client that calls a stage directly can send such a request. The error does not affect the
        other requests of the batch.
        """
        try:
            return self._read(request)
        except Exception as error:
            TritonReply(request).fail(to_public_error(error))
            return None


class ToFlow(TritonReply):
    """Reply of the accumulator to a client request, whose responses are chunks for the flow.

    Args:
        no_voice: voice tensors of all chunks but the first, see `no_voice`.
    """

    def __init__(self, request: Any, no_voice: Voice) -> None:
        super().__init__(request)
        self._no_voice = no_voice

    def forward(self, label: Label, content: FlowContent) -> bool:
        """Sends a chunk to the flow. Returns False if the reply is over."""
        chunk, voice, steps = content
        facts = (chunk.start, chunk.stop, chunk.skip, chunk.provisional, steps, voice is not None)
        arrays = {
            "label": _packed(label),
            "chunk": np.array(facts, np.int32),
            "chunk_tokens": chunk.tokens,
            **{name: getattr(voice or self._no_voice, name) for name in VOICE_INPUTS},
        }
        return self.send_outputs(_batched(arrays))

    def send(self, chunk: AudioChunk) -> None:
        """Does nothing, because the vocoder has sent the audio."""

    def is_cancelled(self) -> bool:
        """Returns False, because Triton tells the models of an ensemble of no cancellation."""
        return False


def no_voice(config: ModelConfig) -> Voice:
    """Returns an empty voice, whose arrays have the shapes of a model's voices."""
    return Voice(
        config.tokens.zeros(0),
        np.zeros((0, config.mel_bands), np.float32),
        np.zeros(config.speaker_size, np.float32),
    )


def flow_part(request: Any) -> Part:
    """Reads a chunk that the accumulator sent with `ToFlow`. The flow calls this function.

    The answer sends mel to the vocoder as (frames, bands). DLPack passes an empty array only in
    this order of axes.
    """
    packed = _array(request, "label")
    label, reply = _label(packed), TritonReply(request)
    start, stop, skip, provisional, steps, has_voice = _array(request, "chunk").tolist()
    voice = Voice(*(_array(request, name) for name in VOICE_INPUTS)) if has_voice else None
    tokens = _array(request, "chunk_tokens")
    chunk = TokenChunk(tokens, start, stop, label.last, skip, bool(provisional))

    def answer(result: NDArray[np.float32] | Token2WavError) -> None:
        if isinstance(result, Token2WavError):
            reply.finish()
            _report(label, result)
        else:
            reply.finish(_batched({"label": packed, "mel": result}))

    return Part(label, FlowContent(chunk, voice, steps), answer)


def vocoder_part(request: Any) -> Part:
    """Reads a chunk that the flow sent. The vocoder calls this function.

    The answer goes to the client, in the same form as the answers of the model `token2wav`.
    """
    label, reply = _label(_array(request, "label")), TritonReply(request)
    content = FrameChunk(torch.from_numpy(_array(request, "mel")).T, label.last)

    def answer(result: AudioChunk | Token2WavError | None) -> None:
        if isinstance(result, AudioChunk):
            final = result.final and not label.error_follows
            reply.finish(outputs_of(replace(result, final=final)))
        else:
            reply.finish()
        _report(label, result)

    return Part(label, content, answer)


def _report(label: Label, result: AudioChunk | Token2WavError | None) -> None:
    """Reports the result of a chunk to the accumulator, without its samples."""
    report: dict[str, Any] = {"stream": label.stream_id}
    if isinstance(result, Token2WavError):
        kind = next((index for index, known in enumerate(_ERRORS) if isinstance(result, known)), 0)
        report["error"] = kind, str(result)
    elif result is not None:
        report["audio"] = len(result.audio), result.sample_rate, result.sound_s
    send(ACCUMULATOR, report)


def result_of(report: dict[str, Any]) -> Result:
    """Returns the result of a chunk that a stage has reported. Its audio is a stand-in without
    memory, of the length of the audio.
    """
    if (error := report.get("error")) is not None:
        kind, text = error
        return _ERRORS[kind](text)
    if (audio := report.get("audio")) is None:
        return None
    samples, sample_rate, sound_s = audio
    stand_in = np.broadcast_to(np.float32(0), samples)
    return AudioChunk(stand_in, 0, False, sample_rate, 0, sound_s=sound_s)


def _packed(label: Label) -> NDArray[np.int64]:
    encoding = list(ENCODERS).index(label.audio_format.encoding)
    sample_rate = label.audio_format.sample_rate or 0
    values = label.stream_id, label.index, label.last, label.error_follows, encoding, sample_rate
    return np.array(values, np.int64)


def _label(packed: NDArray[np.int64]) -> Label:
    stream_id, index, last, error_follows, encoding, sample_rate = packed.tolist()
    audio_format = AudioFormat(list(ENCODERS)[encoding], sample_rate or None)
    return Label(stream_id, index, bool(last), audio_format, bool(error_follows))


def _array(request: Any, name: str) -> NDArray[Any]:
    """Returns a copy of an input tensor without the batch axis.

    The copy is needed because a stage may keep an array for longer than Triton keeps the memory of
    the request.
    """
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise InputError(
            name, "missing; only the ensemble may send requests to this model, not a client"
        )
    return array_of(tensor)[0].copy()


def _batched(arrays: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    # The clone has contiguous strides. NumPy gives other strides to empty arrays and to axes of
    # length 1, and Triton misreads such strides as gaps in memory.
    return {
        name: torch.tensor(array[None]).clone(memory_format=torch.contiguous_format)
        for name, array in arrays.items()
    }
