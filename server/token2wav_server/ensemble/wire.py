"""Stages as models of Triton: chunks and errors are packed into the tensors between them, and read
again.

Runs inside Triton's Python backend only; `protocol.py` says why by DLPack.

Every tensor has a leading batch axis of 1, as Triton's dynamic batching wants it. An error travels
like a chunk, so that it comes after the audio before it and every stage frees the stream; the
vocoder turns it into one of Triton's.
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
from token2wav.errors import EngineError, InputError, LimitError, StreamClosedError, Token2WavError
from token2wav.execution.stages import FrameChunk, TokenChunk
from token2wav.model_config import ModelConfig
from token2wav.serving.audio_output import ENCODERS, AudioChunk, AudioFormat
from token2wav.voice import Voice
from token2wav_server.ensemble.ordered_stage import Label, OrderedStage, Part, Stage, ticker
from token2wav_server.ensemble.stages import FlowContent
from token2wav_server.metrics import batch_streams, open_streams
from token2wav_server.model_process import end_process
from token2wav_server.protocol import VOICE_INPUTS, TritonReply, tensor

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]

_ERRORS: tuple[type[Token2WavError], ...] = (EngineError, LimitError, StreamClosedError, InputError)


class StageModel:
    """Model of Triton that runs what the dynamic batcher has put together; `read` turns a request
    into a part.
    """

    def __init__(
        self, name: str, stage: Stage, read: Callable[[Any], Part], limits: LimitConfig
    ) -> None:
        self._read = read
        self._ordered = OrderedStage(
            stage,
            limits,
            changed=open_streams(name),
            computed=batch_streams(name),
            on_device_lost=end_process,
            # No other process can see that this stage hangs: the accumulator hears nothing of its
            # chunks, and goes on refusing streams for their number, as a full server does. The
            # launcher sees that the process has ended.
            on_hang=lambda seconds: end_process(
                f"has computed one batch for {seconds:.0f} s; it hangs"
            ),
        )
        # Two threads: `expire` waits for the lock that a batch holds, and would wait for a hanging
        # one for ever.
        self._tickers = [
            ticker(look, limits.idle_seconds)
            for look in (self._ordered.expire, self._ordered.watch)
        ]

    def close(self) -> None:
        for stop in self._tickers:
            stop()

    def execute(self, requests: list[Any]) -> None:
        self._ordered.run(
            [part for request in requests if (part := self._part(request)) is not None]
        )

    def _part(self, request: Any) -> Part | None:
        """Reads a request, or refuses it and returns None.

        Only somebody who calls a stage directly can send what cannot be read; it must not harm the
        batch.
        """
        try:
            return self._read(request)
        except Token2WavError as error:
            TritonReply(request).fail(error)
        except Exception as error:
            log.exception("a request could not be read")
            TritonReply(request).fail(EngineError(f"stage: {type(error).__name__}: {error}"))
        return None


class ToFlow:
    """Sender of the accumulator: it sends chunks to the flow in answer to one request of a client."""

    def __init__(self, request: Any, config: ModelConfig) -> None:
        self._sender = request.get_response_sender()
        no_tokens = np.zeros((0, *config.token_shape), np.int32)
        self._nothing = FlowContent(TokenChunk(no_tokens, 0, 0, 0, last=True), None)
        self._no_voice = (
            no_tokens,
            np.zeros((0, config.mel_bands), np.float32),
            np.zeros(config.speaker_size, np.float32),
        )

    def send(self, label: Label, content: FlowContent | Token2WavError) -> None:
        """Sends a chunk, or the error that ends its stream."""
        chunk, voice, steps = self._nothing if isinstance(content, Token2WavError) else content
        given = self._no_voice if voice is None else [getattr(voice, name) for name in VOICE_INPUTS]
        arrays = _header(label, content) | {
            "has_voice": np.array([voice is not None]),
            "window": chunk.tokens,
            "chunk": np.array(
                [chunk.left, chunk.start, chunk.stop, chunk.skip, chunk.provisional, steps],
                np.int32,
            ),
        }
        self._sender.send(_response(arrays | dict(zip(VOICE_INPUTS, given, strict=True))))

    def finish(self) -> None:
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def flow_part(request: Any) -> Part:
    """Reads, in the flow, what `ToFlow` sends.

    Mel goes on as frames by bands, the only order in which DLPack passes an empty array.
    """
    label, bands = _label(request), _array(request, "prompt_mel").shape[1]
    voice = (
        Voice(*(_array(request, name) for name in VOICE_INPUTS))
        if _array(request, "has_voice")[0]
        else None
    )
    left, start, stop, skip, provisional, steps = (int(value) for value in _array(request, "chunk"))
    chunk = TokenChunk(
        _array(request, "window"), left, start, stop, label.last, skip, bool(provisional)
    )
    content = _error(request) or FlowContent(chunk, voice, steps)
    sender = request.get_response_sender()

    def answer(result: NDArray[np.float32] | Token2WavError) -> None:
        mel = np.zeros((0, bands), np.float32) if isinstance(result, Token2WavError) else result
        response = _response(_header(label, result) | {"mel": mel})
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    return Part(label, content, answer)


def vocoder_part(request: Any) -> Part:
    """Reads, in the vocoder, what the flow sends; the client is answered as by the one-process
    model.
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
    """Packs a label, and the error that is sent instead of a chunk's content.

    Its class and message go into bytes, because the stubs of servers up to 2.51 die of strings.
    """
    error = b""
    if isinstance(content, Token2WavError):
        kind = next(
            (number for number, known in enumerate(_ERRORS) if isinstance(content, known)), 0
        )
        error = bytes([kind, *str(content).encode()])
    encoding, sample_rate = label.audio_format.encoding, label.audio_format.sample_rate
    return {
        "stream_id": np.array([label.stream_id], np.int64),
        "chunk_index": np.array([label.index], np.int32),
        "final": np.array([label.last]),
        "audio_format": np.array([list(ENCODERS).index(encoding), sample_rate or 0], np.int32),
        "error": np.frombuffer(error, np.uint8),
    }


def _label(request: Any) -> Label:
    encoding, sample_rate = _array(request, "audio_format").tolist()
    return Label(
        stream_id=int(_array(request, "stream_id")[0]),
        index=int(_array(request, "chunk_index")[0]),
        last=bool(_array(request, "final")[0]),
        audio_format=AudioFormat(list(ENCODERS)[encoding], sample_rate or None),
    )


def _error(request: Any) -> Token2WavError | None:
    if not (encoded := _array(request, "error").tobytes()):
        return None
    kind, text = _ERRORS[encoded[0]], encoded[1:].decode()
    return InputError(*text.split(": ", 1)) if kind is InputError else kind(text)


def _array(request: Any, name: str) -> NDArray[Any]:
    """Copies an input, without the batch axis: a chunk that waits for its predecessor outlives
    Triton's memory.
    """
    found = tensor(request, name)
    if found is None:
        raise InputError(name, "missing; this model is called by the ensemble, not by clients")
    return found[0].copy()


def _response(arrays: Arrays) -> Any:
    # Cloned, since Triton takes the strides that NumPy gives an empty array or a batch axis for
    # gaps.
    tensors = {
        name: torch.tensor(array[None]).clone(memory_format=torch.contiguous_format)
        for name, array in arrays.items()
    }
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor.from_dlpack(*item) for item in tensors.items()]
    )
