"""Wire format between the stages: it packs chunks and errors into tensors, and reads them again.

Runs inside Triton's Python backend only; `protocol.py` says why by DLPack.

Every tensor has a leading batch axis of 1, as Triton's dynamic batching wants it. An error travels like a chunk, so
that it comes after the audio before it and every stage frees the stream; the vocoder turns it into one of Triton's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.errors import (
    EngineError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.execution.stages import FlowChunk, MelChunk
from token2wav.model_config import ModelConfig
from token2wav.serving.audio_output import ENCODERS, AudioChunk, AudioFormat
from token2wav.voice import Voice
from token2wav_server.ensemble.ordered_stage import Label, Part
from token2wav_server.ensemble.stages import FlowContent, VocoderContent
from token2wav_server.protocol import VOICE_INPUTS, TritonReply, tensor

Arrays = dict[str, NDArray[Any]]

_ERRORS: tuple[type[Token2WavError], ...] = (EngineError, LimitError, StreamClosedError)  # InputError is another case


class ToFlow:
    """Sender of the accumulator: it sends chunks to the flow in answer to one request.

    Args:
        request: request of a client.
        config: shapes of the flow's inputs.
    """

    def __init__(self, request: Any, config: ModelConfig) -> None:
        self._sender = request.get_response_sender()
        no_tokens = np.zeros((0, *config.token_shape), np.int32)
        self._no_chunk = FlowChunk(no_tokens, 0, 0, 0, last=True)
        self._no_voice = (
            no_tokens,
            np.zeros((0, config.mel_bands), np.float32),
            np.zeros(config.speaker_size, np.float32),
        )

    def send(self, label: Label, content: FlowContent | Token2WavError) -> None:
        """Sends a chunk, or the error that ends its stream."""
        if isinstance(content, Token2WavError):
            error, chunk, voice, steps = content, self._no_chunk, None, 0
        else:
            error, chunk, voice, steps = None, content.chunk, content.voice, content.steps
        given = self._no_voice if voice is None else [getattr(voice, name) for name in VOICE_INPUTS]
        arrays = _label_arrays(label) | {
            "error": _encoded(error),
            "has_voice": np.array([voice is not None]),
            "window": chunk.tokens,
            "chunk": np.array([chunk.left, chunk.start, chunk.stop, chunk.skip, chunk.provisional, steps], np.int32),
        }
        self._sender.send(_response(arrays | dict(zip(VOICE_INPUTS, given, strict=True))))

    def finish(self) -> None:
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def flow_part(request: Any) -> Part[FlowContent, NDArray[np.float32]]:
    """Reads, in the flow, what `ToFlow` sends."""
    label = _label(request)
    return Part(label, _error(request) or _flow_content(request, label), _ToVocoder(request, label))


def vocoder_part(request: Any) -> Part[VocoderContent, AudioChunk | None]:
    """Reads, in the vocoder, what the flow sends."""
    label = _label(request)
    return Part(label, _error(request) or _vocoder_content(request, label), _ToClient(request))


class _ToVocoder:
    """Reply of the flow: it passes mel on as frames by bands, the only order in which DLPack passes an empty array."""

    def __init__(self, request: Any, label: Label) -> None:
        self._sender = request.get_response_sender()
        self._label = label
        self._bands = _array(request, "prompt_mel").shape[1]

    def send(self, mel: NDArray[np.float32]) -> None:
        self._answer(None, mel)

    def fail(self, error: Token2WavError) -> None:
        self._answer(error, np.zeros((0, self._bands), np.float32))

    def _answer(self, error: Token2WavError | None, mel: NDArray[np.float32]) -> None:
        arrays = _label_arrays(self._label) | {"error": _encoded(error), "mel": mel}
        self._sender.send(_response(arrays), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class _ToClient:
    """Reply of the vocoder: it answers the client as the one-process model does."""

    def __init__(self, request: Any) -> None:
        self._reply = TritonReply(request)

    def send(self, chunk: AudioChunk | None) -> None:
        if chunk is not None:
            self._reply.send(chunk)
        self._reply.finish()

    def fail(self, error: Token2WavError) -> None:
        self._reply.fail(error)


def _flow_content(request: Any, label: Label) -> FlowContent:
    has_voice = _array(request, "has_voice")[0]
    voice = Voice(*(_array(request, name) for name in VOICE_INPUTS)) if has_voice else None
    left, start, stop, skip, provisional, steps = (int(value) for value in _array(request, "chunk"))
    window = _array(request, "window")
    return FlowContent(FlowChunk(window, left, start, stop, label.last, skip, bool(provisional)), voice, steps)


def _vocoder_content(request: Any, label: Label) -> VocoderContent:
    return VocoderContent(MelChunk(torch.from_numpy(_array(request, "mel")).T, label.last), label.audio_format)


def _label(request: Any) -> Label:
    return Label(
        stream_id=int(_array(request, "stream_id")[0]),
        index=int(_array(request, "chunk_index")[0]),
        last=bool(_array(request, "final")[0]),
        audio_format=_audio_format(*_array(request, "audio_format").tolist()),
    )


def _label_arrays(label: Label) -> Arrays:
    return {
        "stream_id": np.array([label.stream_id], np.int64),
        "chunk_index": np.array([label.index], np.int32),
        "final": np.array([label.last]),
        "audio_format": np.array(
            [list(ENCODERS).index(label.audio_format.encoding), label.audio_format.sample_rate or 0], np.int32
        ),
    }


def _audio_format(encoding: int, sample_rate: int) -> AudioFormat:
    return AudioFormat(list(ENCODERS)[encoding], sample_rate or None)


def _array(request: Any, name: str) -> NDArray[Any]:
    """Copies an input, without the batch axis: a chunk that waits for its predecessor outlives Triton's memory."""
    found = tensor(request, name)
    if found is None:
        raise InputError(name, "missing; this model is called by the ensemble, not by clients")
    return found[0].copy()


def _response(arrays: Arrays) -> Any:
    # Cloned, since Triton takes the strides that NumPy gives an empty array or a batch axis for gaps.
    tensors = {
        name: torch.tensor(array[None]).clone(memory_format=torch.contiguous_format) for name, array in arrays.items()
    }
    return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(*item) for item in tensors.items()])


def _encoded(error: Token2WavError | None) -> NDArray[np.uint8]:
    """Packs an error's class and message into bytes, because the stubs of servers up to 2.51 die of strings."""
    if error is None:
        return np.zeros(0, np.uint8)
    kind = next((number for number, known in enumerate(_ERRORS) if isinstance(error, known)), 0)
    number = len(_ERRORS) if isinstance(error, InputError) else kind
    return np.array([number, *str(error).encode()], np.uint8)


def _error(request: Any) -> Token2WavError | None:
    encoded = _array(request, "error")
    if not encoded.size:
        return None
    number, text = int(encoded[0]), encoded[1:].tobytes().decode()
    if number == len(_ERRORS):
        field, _, problem = text.partition(": ")
        return InputError(field, problem)
    return _ERRORS[number](text)
