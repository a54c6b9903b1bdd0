"""Requests of clients, parsed into values.

This module defines the names of all input tensors and request parameters. It runs only inside
Triton's Python backend, which provides `triton_python_backend_utils`.

Tensors are passed as DLPack, not as NumPy arrays. Triton starts a process for each Python model,
which it calls a stub. The stubs of servers up to 2.51 misread arrays of NumPy 2: input arrays get
wrong strides, and output arrays lose their bytes. These stubs also crash on tensors of strings.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import LATENTS_FP16
from token2wav.config.values import shown
from token2wav.errors import InputError
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.voice import FIELDS, NO_VOICE, Voice, voice_for
from token2wav_server.sequences import CLIENT_HEADER, Owner, SequenceId
from token2wav_server.voices import VoiceRegistry

VOICE_INPUTS = FIELDS
VOICE_ID = "voice_id"
STREAM_KEY = "stream_key"
PARAMETERS = (
    "audio_format",
    "sample_rate",
    "keep_open",
    "steps",
    "decoder_noise",
    "delays",
    "end_after_repeats",
    "end_after_silence_s",
    "speed",
    "voice",
    STREAM_KEY,
    CLIENT_HEADER,
)
_NAME_CHARS = 128
_DELAYS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4}){0,63}")
_START, _END = 1, 2  # bits of InferenceRequest.flags()

Parameters = dict[str, Any]  # parameters of a request by name: strings, numbers and booleans


@dataclass(frozen=True)
class Options:
    """Options in the parameters of the first request of an utterance.

    Later requests may repeat the parameters. They are checked again, but have no effect.

    Attributes:
        keep_open: whether the reply to the first request stays open until the utterance ends.
        voice: name of a voice of the server; empty if the request gives no name.
    """

    utterance: UtteranceOptions = DEFAULTS
    keep_open: bool = False
    voice: str = ""

    @classmethod
    def of(cls, parameters: Parameters) -> Options:
        """Reads the options from the parameters of a request.

        Raises:
            InputError: a parameter is unknown, or its value is not allowed.
        """
        for name in parameters:
            if name not in PARAMETERS:
                known = ", ".join(key for key in PARAMETERS if key != CLIENT_HEADER)
                # The error names the field "parameters" and not the unknown parameter. Errors are
                # counted by field, and clients could invent any number of names.
                raise InputError(
                    "parameters",
                    f"{shown(name)} is not a request parameter; expected one of {known}",
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
        decoder_noise = parameters.get("decoder_noise")
        if decoder_noise is not None and not isinstance(decoder_noise, bool):
            raise InputError("decoder_noise", f"{shown(decoder_noise)} is not a boolean")
        voice = parameters.get("voice")
        if voice is not None and (not isinstance(voice, str) or not voice):
            raise InputError("voice", f"{shown(voice)} is not a valid voice name")
        delays = _delays(parameters.get("delays"))
        utterance = UtteranceOptions(
            steps or 0,
            decoder_noise,
            delays,
            audio_format,
            parameters.get("end_after_repeats"),
            parameters.get("end_after_silence_s"),
            parameters.get("speed", 1.0),
        )
        return cls(utterance, keep_open, voice or "")


def _delays(value: Any) -> tuple[int, ...] | None:
    """Reads the delays of the codebooks, integers with commas between them."""
    if value is None:
        return None
    if not isinstance(value, str) or not _DELAYS.fullmatch(value):
        raise InputError("delays", f"{shown(value)} is not a text of integers such as '0,1,2'")
    return tuple(map(int, value.split(",")))


@dataclass(frozen=True, eq=False)
class TritonRequest:
    """Request of a client: some tokens of one utterance.

    An error in the owner (client name or stream key) only refuses the request. `read` raises this
    error. An error in the options, in the voice or in the tokens also closes the stream that the
    request continues. So the caller first finds the stream, and then calls `options` and `voice`,
    which raise such errors.

    Attributes:
        sequence_id: id that all requests of the utterance share. A request with an empty id (0 or
            "") is a whole utterance.
        start: whether the utterance starts with this request.
        end: whether the utterance ends with this request.
        parameters: parameters of the request, not checked yet.
        tokens: tokens, not checked yet; empty if the request has no tokens. The array is a view of
            Triton's memory (see `tensor`).
        voice_inputs: input tensors that describe a voice, by name, as far as the request has them.
            They are views of Triton's memory as well.
    """

    sequence_id: SequenceId
    start: bool
    end: bool
    owner: Owner
    parameters: Parameters
    tokens: NDArray[Any]
    voice_inputs: dict[str, NDArray[Any]]

    @classmethod
    def read(cls, request: Any) -> TritonRequest:
        """Parses a request of Triton.

        Raises:
            InputError: the client name or the stream key is not a string, or is longer than 128
                characters; or the key is empty; or the request has latents of two types.
        """
        sequence_id, flags = request.correlation_id(), request.flags()
        whole = not sequence_id
        parameters = {
            name: value
            for name, value in json.loads(request.parameters() or "{}").items()
            if not _of_triton(name)
        }
        inputs = {part.name(): _array(part) for part in request.inputs()}
        names = [name for name in ("tokens", "latents", LATENTS_FP16) if name in inputs]
        if len(names) > 1:
            raise InputError(names[1], f"sent together with {names[0]}; send only one of them")
        tokens = inputs.pop(names[0]) if names else None
        return cls(
            sequence_id,
            start=whole or bool(flags & _START),
            end=whole or bool(flags & _END),
            owner=_owner(parameters),
            parameters=parameters,
            tokens=np.zeros(0, np.int32) if tokens is None else tokens,
            voice_inputs=inputs,
        )

    def options(self) -> Options:
        """Returns the options in the parameters.

        Raises:
            InputError: a parameter is unknown, or its value is not allowed; or the request
                continues an utterance and carries a voice.
        """
        options = Options.of(self.parameters)
        if self.voice_inputs and not self.start:
            name = next(iter(self.voice_inputs))
            raise InputError(name, "only the first request of an utterance may have this field")
        return options

    def voice(self, name: str, voices: VoiceRegistry, config: ModelConfig) -> Voice:
        """Returns the voice of an utterance from its first request.

        A request gives the voice in one of three ways: by name, by its id (a hash), or as tensors.

        Args:
            name: name of the voice in the options; empty if there is none.
            config: configuration of the model, which limits the shapes of the voice.

        Raises:
            InputError: the name or the id is unknown; the request gives the voice in more than one
                way; a tensor of the voice is missing; the voice does not fit the model; or the
                model takes no voice.
        """
        if not config.takes_voice:
            if name or self.voice_inputs:
                raise InputError("voice" if name else next(iter(self.voice_inputs)), NO_VOICE)
            return voice_for(config, None)
        tensors = {
            field: self.voice_inputs[field] for field in VOICE_INPUTS if field in self.voice_inputs
        }
        digest = self.voice_inputs.get(VOICE_ID)
        if name or digest is not None:
            if tensors or (name and digest is not None):
                raise InputError(
                    "voice" if name else VOICE_ID,
                    "sent together with a voice; send only one of them",
                )
            return voices.named(name) if digest is None else voices.get(digest.tobytes().hex())
        if missing := [field for field in VOICE_INPUTS if field not in tensors]:
            raise InputError(
                missing[0], "missing; the first request of an utterance needs it, or a voice_id"
            )
        voice = Voice(**tensors)
        voice.check(config)
        return voice


def _owner(parameters: Parameters) -> Owner:
    # Triton stores the forwarded gRPC header as a parameter of this name, and replaces a parameter
    # that the client itself has sent under this name.
    client = parameters.get(CLIENT_HEADER, "")
    if not isinstance(client, str) or len(client) > _NAME_CHARS:
        raise InputError(CLIENT_HEADER, f"not a text of at most {_NAME_CHARS} characters")
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
    triton_tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if triton_tensor is None else _array(triton_tensor)


def _array(triton_tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = from_dlpack(triton_tensor.to_dlpack()).numpy()
    return array
