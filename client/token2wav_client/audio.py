"""Audio chunks of an utterance with their timing, sample formats, and frames of equal length."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import soundfile

from token2wav_client.errors import InputError

# Values of a model in CosyVoice3's format with a HiFT vocoder. They are also assumed if the server
# does not send its own values.
SAMPLE_RATE = 24_000
SAMPLES_PER_TOKEN = 960

AudioFormat = Literal["float32", "int16", "mulaw", "alaw"]
AUDIO_FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
AudioArray = npt.NDArray[Any]
Pcm = npt.NDArray[np.float32] | npt.NDArray[np.int16]

# Limit of the server that ended an utterance: `end_after_repeats` or `end_after_silence_s`.
EndReason = Literal["repeats", "silence"]
DTYPES: dict[AudioFormat, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "int16": np.dtype(np.int16),
    "mulaw": np.dtype(np.uint8),
    "alaw": np.dtype(np.uint8),
}
# libsndfile's names of the sample formats.
SUBTYPES = {"float32": "FLOAT", "int16": "PCM_16", "mulaw": "ULAW", "alaw": "ALAW"}
_SILENCE = {"mulaw": 0xFF, "alaw": 0xD5}  # 0 in the other formats


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    """Audio chunk of an utterance: its samples and their arrival times.

    Attributes:
        audio: samples, shape (samples,), or (samples, channels) for a model with several channels;
            float32 in [-1, 1], int16, or uint8 G.711 codes.
        index: number of the chunk within the utterance, from 0.
        final: True for the last chunk of the utterance.
        arrival_s: seconds from sending the first tokens to the arrival of this chunk.
        latency_s: seconds from sending the request that made the chunk possible to the arrival of
            the chunk. This request is the later of two requests that the client can identify: the
            request with the last token whose audio is in the chunk, and the request
            that the server names in the response with the chunk.
        gap_s: seconds since the arrival of the previous chunk; None for the first chunk.
        sample_rate: samples per second.
        samples_per_token: samples of a channel for each token at speed 1, before silence is
            trimmed.
        samples_trimmed: samples at the start of the utterance that the server does not send:
            leading silence, and samples that the decoder does not make. At speed 1 the utterance
            has samples_per_token * tokens - samples_trimmed samples.
        first_token: position in the utterance of the first token that the chunk speaks, in whole or
            in part.
        token_count: tokens that the chunk speaks, in whole or in part. After an interruption, use
            it to compute the tokens that a listener has heard.
        audio_format: format of the samples, as requested.
        end_reason: limit of the server that ended the utterance with this chunk, before the last
            tokens; None in all other chunks.
    """

    audio: AudioArray
    index: int
    final: bool
    arrival_s: float
    latency_s: float
    gap_s: float | None
    sample_rate: int = SAMPLE_RATE
    samples_per_token: int = SAMPLES_PER_TOKEN
    samples_trimmed: int = 0
    first_token: int = 0
    token_count: int = 0
    audio_format: AudioFormat = "float32"
    end_reason: EndReason | None = None

    @property
    def duration_s(self) -> float:
        """Duration of the chunk's audio in seconds."""
        return len(self.audio) / self.sample_rate


def channels_of(audio: AudioArray) -> int:
    """Counts the channels of samples, shape (samples,) or (samples, channels)."""
    return audio.shape[1] if audio.ndim > 1 else 1


def decoded(audio: AudioArray, audio_format: AudioFormat) -> Pcm:
    """Decodes G.711 codes to int16, shape (samples,); returns other formats unchanged."""
    if audio_format not in _SILENCE:
        return audio
    codes = io.BytesIO(audio.tobytes())
    subtype = SUBTYPES[audio_format]
    return soundfile.read(
        codes, dtype="int16", samplerate=8000, channels=1, format="RAW", subtype=subtype
    )[0]


def frames(chunks: Iterable[AudioChunk], milliseconds: float = 20) -> Iterator[AudioArray]:
    """Cuts chunks into frames of equal length, as telephony needs them.

    A frame has the shape (samples,), or (samples, channels). The last frame is padded with silence.
    Raises InputError if the duration is not a whole number of samples.

    Args:
        chunks: chunks of one utterance.
        milliseconds: duration of a frame. It must be a whole number of samples, at least 1.
    """
    rest: AudioArray | None = None
    for chunk in chunks:
        size = chunk.sample_rate * milliseconds / 1000
        if size < 1 or size != int(size):
            raise InputError(
                f"milliseconds: {milliseconds:g} is not a whole number of samples at "
                f"{chunk.sample_rate} Hz"
            )
        audio = chunk.audio if rest is None else np.concatenate((rest, chunk.audio))
        end = len(audio) // int(size) * int(size)
        yield from audio[:end].reshape(-1, int(size), *audio.shape[1:])
        rest = audio[end:]
        if chunk.final and len(rest):
            yield np.pad(
                rest,
                [(0, int(size) - len(rest)), *[(0, 0)] * (rest.ndim - 1)],
                constant_values=_SILENCE.get(chunk.audio_format, 0),
            )
