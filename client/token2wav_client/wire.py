"""Messages of the protocol: builds requests and reads responses, without connection or clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import InferenceServerException

from token2wav_client.audio import (
    AUDIO_FORMATS,
    DTYPES,
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    AudioChunk,
    AudioFormat,
    EndReason,
)
from token2wav_client.errors import InputError, ProtocolError, error_of_response
from token2wav_client.tokens import TokenArray, token_input
from token2wav_client.voice import FIELDS, ClientVoice, check_known_voice, is_voice_id

_DATATYPES = {"uint8": "UINT8", "int32": "INT32", "float32": "FP32"}
# Bound for numbers of steps and sample rates. The server allows only a few numbers, and its error
# names them.
_LARGEST = 2**31 - 1
_SLOWEST, _FASTEST = 0.5, 2.0
# Options that are sent if they are set, with the field of their type.
_OPTIONS = {
    "steps": "int64_param",
    "sample_rate": "int64_param",
    "decoder_noise": "bool_param",
    "end_after_repeats": "int64_param",
    "end_after_silence_s": "double_param",
}
_END_REASONS: tuple[EndReason | None, ...] = (None, "repeats", "silence")


class SpeechOptions(TypedDict, total=False):
    """Options of an utterance: keywords of `open` and `synthesize` in both clients.

    Attributes:
        audio_format: format of the samples: float32 (the default), int16, or G.711 as mulaw or
            alaw.
        keep_open: True (the default) to keep the first request open until the utterance ends. The
            server then notices at once if this client disconnects, otherwise after its idle
            time-out.
        steps: ODE steps, one of the numbers that the server allows; None for the server's default.
        sample_rate: 8000, 16000, 22050, 24000, 44100 or 48000; None for the model's own rate.
        decoder_noise: whether the decoder adds its noise, for models with noise (SNAC); None for
            the server's default.
        headers: headers of the calls of this utterance, besides those of the client. For example,
            `traceparent` makes the spans of Triton a part of your trace.
        end_after_repeats: equal tokens in a row after which the server ends the utterance, 2 or
            more; 0 for no limit; None for the server's default.
        end_after_silence_s: seconds of audio below -50 dBFS after which the server ends the
            utterance; 0 for no limit; None for the server's default.
        speed: tempo of the speech, 0.5 to 2, at the same pitch; 1 by default. Codecs have only 1.
    """

    audio_format: AudioFormat
    keep_open: bool
    steps: int | None
    sample_rate: int | None
    decoder_noise: bool | None
    headers: Mapping[str, str] | None
    end_after_repeats: int | None
    end_after_silence_s: float | None
    speed: float


@dataclass(frozen=True, slots=True)
class Opening:
    """Opening of an utterance: voice and options, which only its first request carries.

    `voice` is the id or the name of a voice if the server already has this voice. It is None for a
    model without voices, such as a codec decoder. Raises InputError if a field is invalid; the
    message names it.
    """

    voice: ClientVoice | str | None
    audio_format: AudioFormat = "float32"
    keep_open: bool = True
    steps: int | None = None
    sample_rate: int | None = None
    decoder_noise: bool | None = None
    headers: Mapping[str, str] | None = None
    end_after_repeats: int | None = None
    end_after_silence_s: float | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        repeats, seconds = self.end_after_repeats, self.end_after_silence_s
        if repeats is not None and (repeats == 1 or not 0 <= repeats <= _LARGEST):
            raise InputError(f"end_after_repeats: {repeats} is not 0 or 2 to {_LARGEST}")
        if seconds is not None and not 0 <= seconds < math.inf:
            raise InputError(f"end_after_silence_s: {seconds} is not a finite number from 0 on")
        if not _SLOWEST <= self.speed <= _FASTEST:
            raise InputError(f"speed: {self.speed} is not from {_SLOWEST:g} to {_FASTEST:g}")
        for name, number in (("steps", self.steps), ("sample_rate", self.sample_rate)):
            if number is not None and not 1 <= number <= _LARGEST:
                raise InputError(f"{name}: {number} is outside 1 to {_LARGEST}")
        if self.audio_format not in AUDIO_FORMATS:
            raise InputError(
                f"audio_format: {self.audio_format!r} is not one of {', '.join(AUDIO_FORMATS)}"
            )
        if isinstance(self.voice, str):
            check_known_voice(self.voice)


@dataclass(frozen=True, slots=True)
class Response:
    """Response of the server to a request."""

    request_id: str  # id of the answered request
    chunk: AudioChunk | None  # audio without arrival times; None if the response has no audio
    last_of_request: bool  # True for the last response to this request


def build_request(
    model: str,
    sequence_id: str,
    request_id: str,
    tokens: TokenArray,
    *,
    stream_key: str = "",
    opening: Opening | None = None,
    end: bool = False,
) -> Any:
    """Builds the ModelInferRequest that carries `tokens`.

    Args:
        sequence_id: id of the utterance.
        request_id: id of this request, which its responses repeat.
        tokens: (n,) or (n, codebooks) int32, or (n, size) float32 latents.
        stream_key: secret of the utterance; empty for none. If the first request carries a key, the
            server requires it in every further request.
        opening: content of the first request of an utterance; None for a later request.
        end: whether the utterance ends with this request.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    parameters = request.parameters
    parameters["sequence_id"].string_param = sequence_id
    parameters["sequence_start"].bool_param = opening is not None
    parameters["sequence_end"].bool_param = end
    parameters["triton_enable_empty_final_response"].bool_param = True
    if stream_key:
        parameters["stream_key"].string_param = stream_key
    _add_input(request, token_input(tokens), tokens)
    if opening is not None:
        parameters["audio_format"].string_param = opening.audio_format
        parameters["keep_open"].bool_param = opening.keep_open
        for name, kind in _OPTIONS.items():
            if (value := getattr(opening, name)) is not None:
                setattr(parameters[name], kind, value)
        if opening.speed != 1:
            parameters["speed"].double_param = opening.speed
        _add_voice(request, opening.voice)
    return request


def _add_voice(request: Any, voice: ClientVoice | str | None) -> None:
    if voice is None:
        return
    if not isinstance(voice, str):
        for name in FIELDS:
            _add_input(request, name, getattr(voice, name))
    elif is_voice_id(voice):
        _add_input(request, "voice_id", np.frombuffer(bytes.fromhex(voice), np.uint8))
    else:
        request.parameters["voice"].string_param = voice


def _add_input(request: Any, name: str, array: np.ndarray[Any, np.dtype[Any]]) -> None:
    request.inputs.add(name=name, datatype=_DATATYPES[array.dtype.name], shape=array.shape)
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    request.raw_input_contents.append(little_endian.tobytes())


def read_response(message: Any, audio_format: AudioFormat) -> Response:
    """Reads one ModelStreamInferResponse.

    Raises:
        ServerError: the response is an error of the server.
        ProtocolError: the response breaks the protocol.
    """
    if message.error_message:
        raise error_of_response(message.error_message)
    response = message.infer_response
    parameters = response.parameters
    last = "triton_final_response" in parameters and parameters["triton_final_response"].bool_param
    chunk = _read_chunk(InferResult(response), audio_format) if response.outputs else None
    return Response(response.id, chunk, last)


def _read_chunk(result: Any, audio_format: AudioFormat) -> AudioChunk:
    audio = _output(result, "audio", DTYPES[audio_format])
    if audio.ndim != 1 and (audio.ndim != 2 or audio.shape[1] < 2):
        raise ProtocolError(
            f"audio: the server sent shape {audio.shape}, expected (samples,) or "
            "(samples, channels)"
        )
    index = _output(result, "chunk_index", np.dtype(np.int32))
    final = _output(result, "final", np.dtype(np.bool_))
    if index.size != 1 or final.size != 1:
        raise ProtocolError(
            f"chunk_index, final: the server sent {index.size} and {final.size} values, expected "
            f"1 each"
        )
    end_code = _number(result, "end_reason", 0, 0)
    if end_code >= len(_END_REASONS):
        raise ProtocolError(
            f"end_reason: the server sent {end_code}, expected 0 to {len(_END_REASONS) - 1}"
        )
    return AudioChunk(
        # tritonclient returns a read-only view of the message.
        audio=audio.copy(),
        index=int(index.item()),
        final=bool(final.item()),
        arrival_s=0.0,
        latency_s=0.0,
        gap_s=None,
        sample_rate=_number(result, "sample_rate", 1, SAMPLE_RATE),
        samples_per_token=_number(result, "samples_per_token", 1, SAMPLES_PER_TOKEN),
        samples_trimmed=_number(result, "samples_trimmed", 0, 0),
        audio_format=audio_format,
        end_reason=_END_REASONS[end_code],
    )


def _number(result: Any, name: str, least: int, usual: int) -> int:
    """Reads a number that describes the audio; returns `usual` if the server does not send it."""
    if result.get_output(name) is None:
        return usual
    value = _output(result, name, np.dtype(np.int32))
    if value.size != 1 or value.item() < least:
        raise ProtocolError(
            f"{name}: the server sent {value.tolist()}, expected one number of at least {least}"
        )
    return int(value.item())


def _output(result: Any, name: str, dtype: np.dtype[Any]) -> Any:
    try:
        array = result.as_numpy(name)
    except (InferenceServerException, ValueError) as error:
        raise ProtocolError(f"{name}: the server sent an unreadable tensor ({error})") from None
    if array is None:
        raise ProtocolError(f"{name}: missing in the server's response")
    if array.dtype != dtype:
        raise ProtocolError(f"{name}: the server sent {array.dtype}, expected {dtype}")
    return array
