"""Protocol between Triton and the workers: reads requests and sends responses.

This module also defines the names of all tensors and request parameters. It runs only inside
Triton's Python backend, which provides `triton_python_backend_utils`.

Tensors are passed as DLPack, not as NumPy arrays. The stub is the process that Triton starts for
each Python model. The stubs of servers up to 2.51 misread arrays of NumPy 2: input arrays get wrong
strides, and output arrays lose their bytes. These stubs also crash on tensors of strings.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from token2wav.config.values import shown
from token2wav.errors import EngineError, InputError, LimitError, StreamClosedError, Token2WavError
from token2wav.model_config import ModelConfig
from token2wav.serving.audio_output import AudioChunk, AudioFormat
from token2wav.voice import FIELDS, Voice
from token2wav_server.launcher.access import CLIENT_HEADER
from token2wav_server.launcher.process import DRAIN_VARIABLE
from token2wav_server.sequences import Owner, SequenceId
from token2wav_server.voices import VoiceRegistry

VOICE_INPUTS = FIELDS
VOICE_ID = "voice_id"
STREAM_KEY = "stream_key"
PARAMETERS = (
    "audio_format",
    "sample_rate",
    "keep_open",
    "steps",
    "voice",
    STREAM_KEY,
    CLIENT_HEADER,
)
_NAME_CHARS = 128

Parameters = dict[str, Any]  # parameters of a request by name: strings, numbers and booleans

# Status code of Triton for each class of error, subclasses included. The codes are attribute names
# of `pb_utils.TritonError`, because Triton sets these attributes only after it has imported this
# module.
STATUS: dict[type[Token2WavError], str] = {
    InputError: "INVALID_ARG",
    StreamClosedError: "NOT_FOUND",
    LimitError: "UNAVAILABLE",
    EngineError: "INTERNAL",
}

_START, _END = 1, 2  # bits of InferenceRequest.flags()


@dataclass(frozen=True)
class Options:
    """Options of an utterance, from the parameters of its first request.

    Later requests may repeat the parameters. They are checked again, but have no effect.

    Attributes:
        audio_format: encoding and sample rate of the audio that the client receives.
        keep_open: whether the reply to the first request stays open until the utterance ends.
        steps: number of ODE steps; 0 for the default of the model.
        voice: name of a voice of the server; empty if the request gives no name.
    """

    audio_format: AudioFormat = field(default_factory=AudioFormat)
    keep_open: bool = False
    steps: int = 0
    voice: str = ""

    @classmethod
    def of(cls, parameters: Parameters) -> Options:
        """Reads the options from the parameters of a request.

        Raises:
            InputError: a parameter is unknown, or its value is not allowed.
        """
        for name in parameters:
            if name not in PARAMETERS:
                known = ", ".join(each for each in PARAMETERS if each != CLIENT_HEADER)
                # The error names the field "parameters" and not the unknown parameter. Errors are
                # counted by field, and clients could invent any number of names.
                raise InputError(
                    "parameters", f"{shown(name)} is not a request parameter; known are {known}"
                )
        audio_format = AudioFormat(
            parameters.get("audio_format", "float32"), parameters.get("sample_rate")
        )
        keep_open = parameters.get("keep_open", False)
        if not isinstance(keep_open, bool):
            raise InputError("keep_open", f"{shown(keep_open)} is not a boolean")
        steps = parameters.get("steps")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise InputError("steps", f"{shown(steps)} is not an integer of at least 1")
        voice = parameters.get("voice")
        if voice is not None and (not isinstance(voice, str) or not voice):
            raise InputError("voice", f"{shown(voice)} is not the name of a voice")
        return cls(audio_format, keep_open, steps or 0, voice or "")


@dataclass(frozen=True)
class Position:
    """Position of a request in the sequence of requests that form one utterance.

    Attributes:
        sequence_id: id that all requests of the utterance share. A request with an empty id (0 or
            "") is a whole utterance.
        start: whether the utterance starts with this request.
        end: whether the utterance ends with this request.
    """

    sequence_id: SequenceId
    start: bool
    end: bool

    @classmethod
    def of(cls, request: Any) -> Position:
        sequence_id, flags = request.correlation_id(), request.flags()
        if not sequence_id:
            return cls(sequence_id, start=True, end=True)
        return cls(sequence_id, start=bool(flags & _START), end=bool(flags & _END))


def parameters_of(request: Any) -> Parameters:
    """Returns the parameters of a request, except for the parameters that only Triton reads."""
    parameters: Parameters = json.loads(request.parameters() or "{}")
    return {name: value for name, value in parameters.items() if not _of_triton(name)}


def owner_of(parameters: Parameters) -> Owner:
    """Reads the client name and the stream key of a request.

    Raises:
        InputError: the name or the key is not a string, or is longer than 128 characters; or the
            key is empty.
    """
    # Triton stores the forwarded gRPC header as a parameter of this name, and replaces a parameter
    # that the client itself has sent under this name.
    client = parameters.get(CLIENT_HEADER, "")
    if not isinstance(client, str) or len(client) > _NAME_CHARS:
        raise InputError(CLIENT_HEADER, f"not a name of at most {_NAME_CHARS} characters")
    key = parameters.get(STREAM_KEY)
    if key is not None and not (isinstance(key, str) and 1 <= len(key) <= _NAME_CHARS):
        raise InputError(STREAM_KEY, f"not a text of 1 to {_NAME_CHARS} characters")
    return Owner(client, key or "")


def _of_triton(name: str) -> bool:
    return name.startswith("triton_") or name in (
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
    )


def tensor(request: Any, name: str) -> NDArray[Any] | None:
    """Returns an input tensor of a request, or None if the request has no such tensor.

    The array is a view of Triton's memory, which is freed once the request has been answered.
    """
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else from_dlpack(found.to_dlpack()).numpy()


def tokens_of(request: Any) -> NDArray[Any]:
    """Returns the tokens of a request; an empty array if the request has no tokens."""
    found = tensor(request, "tokens")
    return np.zeros(0, np.int32) if found is None else found


def voice_of(request: Any, name: str, voices: VoiceRegistry, config: ModelConfig) -> Voice:
    """Returns the voice of an utterance from its first request.

    A request gives the voice in one of three ways: by name, by its id (a hash), or as tensors.

    Args:
        request: first request of the utterance.
        name: name of the voice in the parameters of the request; empty if there is none.
        voices: registry that finds a voice by name or by id.
        config: configuration of the model, which limits the shapes of the voice.

    Raises:
        InputError: the name or the id is unknown; the request gives the voice in more than one
            way; a tensor of the voice is missing; or the voice does not fit the model.
    """
    given = {each: array for each in VOICE_INPUTS if (array := tensor(request, each)) is not None}
    digest = tensor(request, VOICE_ID)
    if name or digest is not None:
        if given or (name and digest is not None):
            raise InputError("voice" if name else VOICE_ID, "comes with a voice; send either")
        return voices.named(name) if digest is None else voices.get(digest.tobytes().hex())
    if missing := [each for each in VOICE_INPUTS if each not in given]:
        raise InputError(
            missing[0], "missing; the first request of an utterance carries it, or a voice_id"
        )
    voice = Voice(**given)
    voice.check(config)
    return voice


def refuse_voice(request: Any) -> None:
    """Checks that a request which continues an utterance carries no voice.

    Raises:
        InputError: the request carries a tensor of a voice, or a voice id.
    """
    for name in (*VOICE_INPUTS, VOICE_ID):
        if pb_utils.get_input_tensor_by_name(request, name) is not None:
            raise InputError(name, "only the first request of an utterance carries it")


class TritonReply:
    """Reply to one request, sent through Triton's response sender. It is thread-safe.

    Args:
        request: Triton's request.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        # After the final response Triton frees the memory that the sender refers to. A call of the
        # sender after that, `is_cancelled` included, crashes tritonserver. The lock and `_over`
        # prevent such calls.
        self._lock = threading.Lock()
        self._over = False

    def send(self, chunk: AudioChunk) -> None:
        outputs = {
            "audio": chunk.audio,
            "chunk_index": np.array([chunk.index], np.int32),
            "final": np.array([chunk.final]),
            "sample_rate": np.array([chunk.sample_rate], np.int32),
            "samples_per_token": np.array([chunk.samples_per_token], np.int32),
            "samples_trimmed": np.array([chunk.samples_trimmed], np.int32),
        }
        tensors = [
            pb_utils.Tensor.from_dlpack(name, torch.from_numpy(array))
            for name, array in outputs.items()
        ]
        with self._lock:
            if not self._over:  # false if the utterance was cancelled while the chunk was computed
                self._sender.send(pb_utils.InferenceResponse(tensors))

    def finish(self) -> None:
        self._send_final()

    def fail(self, error: Token2WavError) -> None:
        name = next((name for kind, name in STATUS.items() if isinstance(error, kind)), "INTERNAL")
        status = getattr(pb_utils.TritonError, name)
        self._send_final(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), status)))

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._over and self._sender.is_cancelled()

    def _send_final(self, *response: Any) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def admitted(request: Any) -> bool:
    """Returns whether a request may be processed.

    While the server drains, a request that starts an utterance is refused: this function answers
    it with a LimitError and returns False.
    """
    # The launcher sets this variable. A server that was started in another way never drains.
    file = os.environ.get(DRAIN_VARIABLE)
    if not (Position.of(request).start and file and Path(file).exists()):
        return True
    TritonReply(request).fail(LimitError("server: it is shutting down; try another one"))
    return False
