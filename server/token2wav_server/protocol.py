"""Protocol between Triton and the workers: it names tensors and parameters, reads requests and
sends answers.

Runs inside Triton's Python backend only, which provides `triton_python_backend_utils`. Tensors pass
by DLPack: the stubs of servers up to 2.51 misread NumPy 2 arrays (wrong strides on the way in, no
bytes on the way out), and die of strings.
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

Parameters = dict[str, Any]  # values of a request by their names: texts, numbers and booleans

# Names of codes of pb_utils.TritonError, which Triton fills in only after it has imported this
# module. They hold for subclasses too.
STATUS: dict[type[Token2WavError], str] = {
    InputError: "INVALID_ARG",
    StreamClosedError: "NOT_FOUND",
    LimitError: "UNAVAILABLE",
    EngineError: "INTERNAL",
}

_START, _END = 1, 2  # bits of InferenceRequest.flags()


@dataclass(frozen=True)
class Options:
    """Options in the first request of an utterance; 0 steps are the usual number, and empty names
    are none.

    A later request may repeat them. They are checked there too, and change nothing.
    """

    audio_format: AudioFormat = field(default_factory=AudioFormat)
    keep_open: bool = False
    steps: int = 0
    voice: str = ""

    @classmethod
    def of(cls, parameters: Parameters) -> Options:
        """Reads request parameters.

        Raises:
            InputError: a parameter is not known, or has a value that it cannot have.
        """
        for name in parameters:
            if name not in PARAMETERS:
                known = ", ".join(each for each in PARAMETERS if each != CLIENT_HEADER)
                # Under one field, because errors are counted by it: names that clients make up
                # would be endless.
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
    """Position of a request in its sequence. Without a sequence id it is a whole utterance."""

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
    """Returns the parameters of a request, without those that only Triton reads."""
    parameters: Parameters = json.loads(request.parameters() or "{}")
    return {name: value for name, value in parameters.items() if not _of_triton(name)}


def owner_of(parameters: Parameters) -> Owner:
    """Reads the client name and the stream key of a request.

    Raises:
        InputError: one of them is no text, or is too long.
    """
    # a forwarded header replaces a parameter of this name
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
    """Returns an input of a request, or None: a view of memory that is gone once the request is
    answered.
    """
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else from_dlpack(found.to_dlpack()).numpy()


def tokens_of(request: Any) -> NDArray[Any]:
    """Returns the tokens of a request, which may come without any."""
    found = tensor(request, "tokens")
    return np.zeros(0, np.int32) if found is None else found


def voice_of(request: Any, name: str, voices: VoiceRegistry, config: ModelConfig) -> Voice:
    """Returns the voice that the first request of an utterance names or sends along.

    Raises:
        InputError: no voice has the `name` of its parameters, if not empty, or the id; another one
            comes beside it; it is not whole, or does not fit the model.
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
    """Raises InputError if a request that continues an utterance carries a voice."""
    for name in (*VOICE_INPUTS, VOICE_ID):
        if pb_utils.get_input_tensor_by_name(request, name) is not None:
            raise InputError(name, "only the first request of an utterance carries it")


class TritonReply:
    """Reply to one request through its response sender; several threads may use it.

    Args:
        request: Triton's request.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        # After the last word the server frees what a sender refers to. To ask it then kills
        # tritonserver.
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
            if not self._over:  # else the utterance was cancelled while this chunk was computed
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
    """Says whether a request may go on; one that starts an utterance while the server drains is
    refused here.
    """
    # a server that our launcher did not start has none, and never drains
    file = os.environ.get(DRAIN_VARIABLE)
    if not (Position.of(request).start and file and Path(file).exists()):
        return True
    TritonReply(request).fail(LimitError("server: it is shutting down; try another one"))
    return False
