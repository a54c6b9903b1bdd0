"""Stages as Triton models, and the tensors that carry chunks and errors between them.

This module runs only inside Triton's Python backend. Tensors are passed as DLPack, for the reason
given in `triton_request.py`.

Every tensor has a leading batch axis of 1, which Triton's dynamic batching needs.

An error is sent in the place of a chunk. So the error arrives after the audio of all earlier
chunks, and every stage that it passes releases its state of the stream. The last stage, the
vocoder, answers the client with a Triton error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.config import LimitConfig
from token2wav.config.model_config import ModelConfig
from token2wav.errors import BackendError, InputError, LimitError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import ENCODERS, AudioChunk, AudioFormat
from token2wav.stages.stage import FrameChunk, TokenChunk
from token2wav.voice import FIELDS as VOICE_INPUTS
from token2wav.voice import Voice
from token2wav_server.ensemble.ordered_stage import Label, OrderedStage, Part, Stage, ticker
from token2wav_server.ensemble.stages import FlowContent
from token2wav_server.metrics import batch_streams, open_streams
from token2wav_server.model_process import end_process
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_request import tensor

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]

_ERRORS: tuple[type[Token2WavError], ...] = (
    BackendError,
    LimitError,
    StreamClosedError,
    InputError,
)


class StageModel:
    """Triton model of one stage, which computes the batches of Triton's dynamic batcher.

    Args:
        name: name of the model in Triton, a label of its metrics.
    """

    def __init__(
        self, name: str, stage: Stage, read: Callable[[Any], Part], limits: LimitConfig
    ) -> None:
        self._read = read
        self._ordered = OrderedStage(
            stage,
            limits,
            changed=open_streams(name),
            on_batch=batch_streams(name),
            on_device_lost=end_process,
            # A stage that hangs has to end its own process, because no other process notices the
            # hang. The accumulator receives no results of its chunks. It would only refuse new
            # streams when its limit is reached, like a server that is full. The launcher notices
            # the end of this process, and restarts the server.
            on_hang=lambda seconds: end_process(f"hangs (its batch has run for {seconds:.0f} s)"),
        )
        # `expire` and `watch` have a thread each. `expire` waits for the lock, and a running batch
        # holds it. If both shared a thread, a batch that hangs would block `watch` forever.
        self._tickers = [
            ticker(check, limits.idle_seconds)
            for check in (self._ordered.expire, self._ordered.watch)
        ]

    def close(self) -> None:
        for stop in self._tickers:
            stop()

    def execute(self, requests: list[Any]) -> None:
        self._ordered.run(
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
        except Token2WavError as error:
            TritonReply(request).fail(error)
        except Exception as error:
            log.exception("a request to a stage could not be read")
            TritonReply(request).fail(BackendError(f"stage: {type(error).__name__}: {error}"))
        return None


class ToFlow:
    """Sender of the accumulator, which sends chunks to the flow in answer to one client request.

    Args:
        config: configuration of the model, which determines the shapes of empty tensors.
    """

    def __init__(self, request: Any, config: ModelConfig) -> None:
        self._sender = request.get_response_sender()
        no_tokens = config.tokens.zeros(0)
        self._no_content = FlowContent(TokenChunk(no_tokens, 0, 0, last=True), None)
        self._no_voice = (
            no_tokens,
            np.zeros((0, config.mel_bands), np.float32),
            np.zeros(config.speaker_size, np.float32),
        )

    def send(self, label: Label, content: FlowContent | Token2WavError) -> None:
        """Sends a chunk, or the error that ends its stream."""
        chunk, voice, steps = self._no_content if isinstance(content, Token2WavError) else content
        voice_arrays = (
            self._no_voice if voice is None else [getattr(voice, name) for name in VOICE_INPUTS]
        )
        arrays = _header(label, content) | {
            "has_voice": np.array([voice is not None]),
            "chunk_tokens": chunk.tokens,
            "chunk": np.array(
                [chunk.start, chunk.stop, chunk.skip, chunk.provisional, steps],
                np.int32,
            ),
        }
        self._sender.send(_response(arrays | dict(zip(VOICE_INPUTS, voice_arrays, strict=True))))


def flow_part(request: Any) -> Part:
    """Reads a chunk that the accumulator sent with `ToFlow`. The flow calls this function.

    The answer sends mel to the vocoder as (frames, bands). DLPack passes an empty array only in
    this order of axes.
    """
    label, bands = _label(request), _array(request, "prompt_mel").shape[1]
    voice = (
        Voice(*(_array(request, name) for name in VOICE_INPUTS))
        if _array(request, "has_voice")[0]
        else None
    )
    start, stop, skip, provisional, steps = (int(value) for value in _array(request, "chunk"))
    chunk = TokenChunk(
        _array(request, "chunk_tokens"), start, stop, label.last, skip, bool(provisional)
    )
    content = _error(request) or FlowContent(chunk, voice, steps)
    sender = request.get_response_sender()

    def answer(result: NDArray[np.float32] | Token2WavError) -> None:
        mel = np.zeros((0, bands), np.float32) if isinstance(result, Token2WavError) else result
        response = _response(_header(label, result) | {"mel": mel})
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    return Part(label, content, answer)


def vocoder_part(request: Any) -> Part:
    """Reads a chunk that the flow sent. The vocoder calls this function.

    The answer goes to the client, in the same form as the answers of the model `token2wav`.
    """
    label = _label(request)
    content = _error(request) or FrameChunk(torch.from_numpy(_array(request, "mel")).T, label.last)
    reply = TritonReply(request)

    def answer(result: AudioChunk | Token2WavError | None) -> None:
        if isinstance(result, Token2WavError):
            return reply.fail(result)
        if result is not None:
            reply.send(result)
        return reply.finish()

    return Part(label, content, answer)


def _header(label: Label, content: object) -> Arrays:
    """Packs a label into arrays, and the error if `content` is one.

    The class and the message of the error are packed into bytes, because the stubs of servers up to
    2.51 crash on tensors of strings.
    """
    error = b""
    if isinstance(content, Token2WavError):
        class_index = next(
            (index for index, known in enumerate(_ERRORS) if isinstance(content, known)), 0
        )
        error = bytes([class_index, *str(content).encode()])
    encoding, sample_rate = label.audio_format.encoding, label.audio_format.sample_rate
    return {
        "stream_id": np.array([label.stream_id], np.int64),
        "chunk_index": np.array([label.index], np.int32),
        "final": np.array([label.last]),
        "audio_format": np.array([list(ENCODERS).index(encoding), sample_rate or 0], np.int32),
        "admitted": np.array([label.admitted]),
        "error": np.frombuffer(error, np.uint8),
    }


def _label(request: Any) -> Label:
    encoding, sample_rate = _array(request, "audio_format").tolist()
    return Label(
        stream_id=int(_array(request, "stream_id")[0]),
        index=int(_array(request, "chunk_index")[0]),
        last=bool(_array(request, "final")[0]),
        audio_format=AudioFormat(list(ENCODERS)[encoding], sample_rate or None),
        admitted=float(_array(request, "admitted")[0]),
    )


def _error(request: Any) -> Token2WavError | None:
    if not (encoded := _array(request, "error").tobytes()):
        return None
    error_class, text = _ERRORS[encoded[0]], encoded[1:].decode()
    if error_class is InputError:
        field, _, problem = text.partition(": ")
        return InputError(field, problem)
    return error_class(text)


def _array(request: Any, name: str) -> NDArray[Any]:
    """Returns a copy of an input tensor without the batch axis.

    The copy is needed because a chunk may wait for its predecessor longer than Triton keeps the
    memory of the request.

    Raises:
        InputError: the request has no such tensor.
    """
    batch = tensor(request, name)
    if batch is None:
        raise InputError(
            name, "missing; only the ensemble may send requests to this model, not a client"
        )
    return batch[0].copy()


def _response(arrays: Arrays) -> Any:
    # The clone has contiguous strides. NumPy gives other strides to empty arrays and to axes of
    # length 1, and Triton misreads such strides as gaps in memory.
    tensors = {
        name: torch.tensor(array[None]).clone(memory_format=torch.contiguous_format)
        for name, array in arrays.items()
    }
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor.from_dlpack(name, values) for name, values in tensors.items()]
    )
