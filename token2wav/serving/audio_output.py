"""Output of an utterance: trims, resamples, marks and encodes the audio of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.config.values import shown
from token2wav.errors import BackendError, InputError
from token2wav.serving.audio_mark import AudioMark, Marking
from token2wav.serving.end_limits import (
    WINDOW_MS,
    EndReason,
    SilenceLimit,
    audible,
    window_samples,
)

SAMPLE_RATES = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)


def _int16(audio: NDArray[np.float32]) -> NDArray[np.int16]:
    # Clipped, because a resampler can overshoot.
    return np.rint(np.clip(audio, -1, 1) * np.float32(32767)).astype(np.int16)


def _mulaw(audio: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encodes as G.711 mu-law: sign, 3 bits of exponent, 4 of mantissa, all inverted."""
    pcm = _int16(audio).astype(np.int32)
    magnitude = np.minimum(np.abs(pcm) >> 2, 8158) + 33
    exponent = np.frexp(magnitude)[1] - 6
    return (~((pcm < 0) << 7 | exponent << 4 | (magnitude >> (exponent + 1)) & 15)).astype(np.uint8)


def _alaw(audio: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encodes as G.711 A-law: sign, 3 bits of exponent, 4 of mantissa, every other bit inverted."""
    pcm = _int16(audio).astype(np.int32)
    magnitude = np.abs(pcm) >> 4
    exponent = np.maximum(np.frexp(magnitude)[1] - 4, 0)
    code = exponent << 4 | (magnitude >> np.maximum(exponent - 1, 0)) & 15
    return (((pcm >= 0) << 7 | code) ^ 0x55).astype(np.uint8)


ENCODERS: dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    "float32": lambda audio: audio,
    "int16": _int16,
    "mulaw": _mulaw,
    "alaw": _alaw,
}
_ONE_CHANNEL = ("mulaw", "alaw")  # G.711


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Chunk of audio, as it is sent to the client.

    Attributes:
        audio: (samples,), or (samples, channels) for a model with several channels, in the encoding
            of `AudioFormat`, by default float32.
        index: 0, 1, 2 ... within the utterance.
        samples_per_token: an utterance of N tokens has N * samples_per_token - samples_trimmed
            samples at speed 1.
        samples_trimmed: samples at the start of the utterance that are not sent: leading silence
            removed so far, and samples that the decoder does not make.
        first_token: index of the first token that this audio speaks, wholly or in part.
        token_count: tokens that this audio speaks, wholly or in part.
        sound_s: offset of the utterance's first sound in this chunk, in seconds; None if the first
            sound is in another chunk.
        end_reason: limit that ended the utterance with this chunk; None in all other chunks.
    """

    audio: NDArray[Any]
    index: int
    final: bool
    sample_rate: int
    samples_per_token: int
    samples_trimmed: int = 0
    first_token: int = 0
    token_count: int = 0
    sound_s: float | None = None
    end_reason: EndReason | None = None

    @property
    def duration_s(self) -> float:
        return len(self.audio) / self.sample_rate


@dataclass(frozen=True)
class AudioFormat:
    """Format of the audio of an utterance. Raises InputError for an unknown one."""

    encoding: str = "float32"  # key of `ENCODERS`
    sample_rate: int | None = None  # one of `SAMPLE_RATES`; None for the rate of the model

    def __post_init__(self) -> None:
        if self.encoding not in tuple(ENCODERS):  # a tuple, because the value may be unhashable
            raise InputError(
                "audio_format", f"{shown(self.encoding)} is not one of {', '.join(ENCODERS)}"
            )
        if self.sample_rate is not None and (
            type(self.sample_rate) is not int or self.sample_rate not in SAMPLE_RATES
        ):
            raise InputError(
                "sample_rate",
                f"{shown(self.sample_rate)} is not one of {', '.join(map(str, SAMPLE_RATES))}",
            )


class AudioOutput:
    """Output of one utterance.

    N tokens yield exactly N * `samples_per_token` samples at speed 1, minus `samples_trimmed`,
    however the audio is divided into chunks. A resampler holds back up to 40 ms of audio (75 ms at
    8 kHz) until the next chunk.

    Leading silence of up to `trim_silence_ms` is removed, in windows of 10 ms below -50 dBFS. If
    silence lasts for `end_after_silence_s`, the audio ends there.

    Args:
        speed: exact speed of the utterance, at which `samples_per_token` / `speed` samples speak a
            token.
        mark: plugin that marks the samples after they are resampled, and may hold some back until
            the next chunk; None for no mark.

    Attributes:
        end_reason: limit that has ended the utterance. The caller sets it for a limit on tokens.

    Raises:
        InputError: a token would not have a whole number of samples at the sample rate of
            `audio_format`; audio has to be resampled and the library soxr is not installed;
            `audio_format` is G.711, and the model has several channels; or the mark does not
            support the audio.
        BackendError: the plugin of the mark failed.
    """

    def __init__(
        self,
        config: ModelConfig,
        audio_format: AudioFormat | None = None,
        trim_silence_ms: float = 0.0,
        end_after_silence_s: float = 0.0,
        speed: Fraction = Fraction(1),
        mark: AudioMark | None = None,
    ) -> None:
        self.audio_format = audio_format = audio_format or AudioFormat()
        self._channels, self._missing = config.channels, config.missing_samples
        if self._channels > 1 and audio_format.encoding in _ONE_CHANNEL:
            raise InputError(
                "audio_format",
                f"{audio_format.encoding} has one channel, but this model has {self._channels}; "
                "expected float32 or int16",
            )
        self._model_rate = config.sample_rate
        self._sample_rate = audio_format.sample_rate or config.sample_rate
        self._ratio = Fraction(self._sample_rate, config.sample_rate)
        samples_per_token = config.samples_per_token * self._ratio
        if samples_per_token.denominator != 1:
            raise InputError(
                "sample_rate",
                f"{self._sample_rate} gives {float(samples_per_token):.2f} samples per "
                "token of this model, which is not a whole number; the rate of the model "
                f"is {config.sample_rate}",
            )
        self._samples_per_token = int(samples_per_token)
        self._spoken_samples = samples_per_token / speed  # of a token
        self._resampler = _resampler(config, self._sample_rate) if self._ratio != 1 else None
        self._marking = Marking(mark, self._sample_rate, self._channels) if mark else None
        self._encode = ENCODERS[audio_format.encoding]
        self._window = window_samples(self._model_rate)
        self._windows_to_trim = int(trim_silence_ms / WINDOW_MS)
        self._silence = SilenceLimit(end_after_silence_s, self._model_rate, self._channels)
        self.end_reason: EndReason | None = None
        self.ended = False
        # Incomplete last window. It is held back while silence is trimmed.
        self._undecided = np.zeros((0, *self._shape), np.float32)
        self._received = self._kept = self._samples_trimmed = self._index = 0
        self._resampled = self._sent = 0  # samples at the rate of the client
        self._sound_s: float | None = None

    def result(self, audio: NDArray[np.float32], *, last: bool) -> AudioChunk | BackendError | None:
        """Returns the result of `take`, or the error that ends this utterance and no other."""
        if not np.isfinite(audio).all():
            return BackendError("backend: the model produced NaN or infinite audio")
        try:
            return self.take(audio, last=last)
        except BackendError as error:
            return error

    def take(self, audio: NDArray[np.float32], *, last: bool) -> AudioChunk | None:
        """Converts the next audio of the model to a chunk.

        Args:
            audio: (samples,) at the rate of the model, or (channels * samples,) with the samples of
                the channels in turn.

        Returns:
            Chunk to send; None if no sample can be sent yet. With `last`, or if silence ends the
            audio, the result is always a chunk, which may be empty.

        Raises:
            BackendError: the plugin of the mark failed.
        """
        audio = audio.reshape(-1, *self._shape)
        if (end := self._silence.end(audio)) is not None:
            audio, last, self.end_reason = audio[:end], True, EndReason.SILENCE
        if not self._received and len(audio):
            self._received = self._missing
            self._note_trimmed(self._missing)
        self._received += len(audio)
        audio = self._trimmed(audio, last)
        if self._sound_s is None and (sounds := np.flatnonzero(audible(audio, self._window))).size:
            self._sound_s = (self._kept + int(sounds[0]) * self._window) / self._model_rate
        self._kept += len(audio)
        if self._resampler is not None:
            audio = self._resampler.resample_chunk(audio, last=last)
        if last:
            due = int(self._received * self._ratio) - self._samples_trimmed
            audio = audio[: due - self._resampled]
        self._resampled += len(audio)
        if self._marking is not None:
            audio = self._marking.take(audio, last=last)
        if not len(audio) and not last:
            return None
        start, self._sent = self._sent, self._sent + len(audio)
        start_s = start / self._sample_rate
        begins = (
            self._sound_s is not None and start_s <= self._sound_s < self._sent / self._sample_rate
        )
        self._index += 1
        self.ended = last
        # Trimmed samples belong to tokens too.
        begin, end = start + self._samples_trimmed, self._sent + self._samples_trimmed
        first_token = begin // self._spoken_samples
        return AudioChunk(
            self._encode(audio),
            self._index - 1,
            last,
            self._sample_rate,
            self._samples_per_token,
            self._samples_trimmed,
            first_token,
            -(-end // self._spoken_samples) - first_token if len(audio) else 0,
            self._sound_s - start_s if begins and self._sound_s is not None else None,
            self.end_reason if last else None,
        )

    def close(self) -> None:
        """Frees the state of the mark. No audio may follow. A second call does nothing."""
        if self._marking is not None:
            self._marking.close()

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self._channels,) if self._channels > 1 else ()

    def _trimmed(self, audio: NDArray[np.float32], last: bool) -> NDArray[np.float32]:
        if not self._windows_to_trim:
            return audio
        audio = np.concatenate((self._undecided, audio))
        sounds = audible(audio[: self._windows_to_trim * self._window], self._window)
        windows = int(sounds.argmax()) if sounds.any() else len(sounds)
        self._windows_to_trim = 0 if sounds.any() else self._windows_to_trim - windows
        self._note_trimmed(self._received - len(audio) + windows * self._window)
        audio = audio[windows * self._window :]
        self._undecided = np.zeros_like(audio[:0])
        if self._windows_to_trim and not last:
            self._undecided, audio = audio, self._undecided
        return audio

    def _note_trimmed(self, samples: int) -> None:
        # Rounded up, so that the resampler always yields enough samples for N tokens.
        self._samples_trimmed = -int(-samples * self._ratio // 1)


def _resampler(config: ModelConfig, sample_rate: int) -> Any:
    try:
        # The import is here, because a machine without soxr can still serve the model's own rate.
        import soxr
    except ImportError:
        raise InputError(
            "sample_rate",
            f"{sample_rate} needs the library soxr, which is not installed on this server; "
            f"the rate of the model is {config.sample_rate}",
        ) from None
    return soxr.ResampleStream(config.sample_rate, sample_rate, config.channels, "float32")
