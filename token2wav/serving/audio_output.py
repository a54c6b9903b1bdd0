"""Output of an utterance: it trims, resamples and encodes the model's audio into what its listener
is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.config.values import shown
from token2wav.errors import InputError
from token2wav.model_config import ModelConfig

SAMPLE_RATES = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)
_WINDOW_MS = 10  # shorter than any sound of speech, longer than a click
# -50 dBFS, mean square. Lower, noise of the demo voice passes for sound; higher, soft consonants
# are lost.
_AUDIBLE = 10 ** (-50 / 10)


def _int16(audio: NDArray[np.float32]) -> NDArray[np.int16]:
    """Rounds to 16 bits, with full scale at 32767; a resampler can overshoot it."""
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


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Chunk of audio, as it is sent.

    Attributes:
        audio: (samples,) mono; float32, or what a server's client asked for.
        index: 0, 1, 2 ... within the utterance.
        final: whether the utterance ends with it.
        sample_rate: samples per second.
        samples_per_token: samples that an utterance has for each of its tokens, once it is over.
        samples_trimmed: samples of silence that were dropped before the first one, and are missing
            in that sum.
        sound_s: seconds into this chunk at which the utterance is first heard; None in all others.
    """

    audio: NDArray[Any]
    index: int
    final: bool
    sample_rate: int
    samples_per_token: int
    samples_trimmed: int = 0
    sound_s: float | None = None

    @property
    def duration_s(self) -> float:
        return len(self.audio) / self.sample_rate

    @property
    def trimmed_s(self) -> float:
        return self.samples_trimmed / self.sample_rate


@dataclass(frozen=True)
class AudioFormat:
    """Format in which a listener wants the audio.

    Attributes:
        encoding: of a sample, a key of `ENCODERS`.
        sample_rate: samples per second, one of `SAMPLE_RATES`; None for the model's own.

    Raises:
        InputError: neither is known.
    """

    encoding: str = "float32"
    sample_rate: int | None = None

    def __post_init__(self) -> None:
        if self.encoding not in tuple(ENCODERS):  # which may be unhashable
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
    """Output of one utterance: it takes the model's audio and gives the chunks that are sent.

    N tokens give exactly as many samples as `samples_per_token` says, less `samples_trimmed`,
    however the audio is portioned. A resampler holds back up to 40 ms of it, 75 ms at 8 kHz, and
    gives it with what follows or the end.

    Up to `trim_silence_ms` of leading silence are dropped, in windows of 10 ms below -50 dBFS.

    Raises:
        InputError: the model cannot have that sample rate, or the library that resamples is
            missing.
    """

    def __init__(
        self,
        config: ModelConfig,
        audio_format: AudioFormat | None = None,
        trim_silence_ms: float = 0.0,
    ) -> None:
        audio_format = audio_format or AudioFormat()
        self._model_rate = config.sample_rate
        self._sample_rate = audio_format.sample_rate or config.sample_rate
        self._ratio = Fraction(self._sample_rate, config.sample_rate)
        samples_per_token = config.samples_per_token * self._ratio
        if samples_per_token.denominator != 1:
            raise InputError(
                "sample_rate",
                f"{self._sample_rate} gives {float(samples_per_token):.2f} samples per token of "
                f"this model, no whole "
                f"number; its own is {config.sample_rate}",
            )
        self._samples_per_token = int(samples_per_token)
        self._resampler = (
            None if self._ratio == 1 else _resampler(config.sample_rate, self._sample_rate)
        )
        self._encode = ENCODERS[audio_format.encoding]
        self._window = round(_WINDOW_MS * config.sample_rate / 1000)
        self._windows_to_trim = int(trim_silence_ms / _WINDOW_MS)
        self._undecided = np.zeros(0, np.float32)  # less than a window, while silence is trimmed
        self._given = self._kept = self._sent = self._samples_trimmed = self._index = 0
        self._sound_s: float | None = None

    def take(self, audio: NDArray[np.float32], *, last: bool) -> AudioChunk | None:
        """Takes the model's next audio, (samples,) at its rate; returns the chunk to send, or None
        if nothing is left.

        There is always a chunk for the `last` audio, which ends the utterance.
        """
        self._given += len(audio)
        audio = self._trimmed(audio, last)
        if self._sound_s is None and (audible := np.flatnonzero(self._audible(audio))).size:
            self._sound_s = (self._kept + int(audible[0]) * self._window) / self._model_rate
        self._kept += len(audio)
        if self._resampler is not None:
            audio = self._resampler.resample_chunk(audio, last=last)
        if last:
            audio = audio[: int(self._given * self._ratio) - self._samples_trimmed - self._sent]
        if not len(audio) and not last:
            return None
        start_s, self._sent = self._sent / self._sample_rate, self._sent + len(audio)
        begins = (
            self._sound_s is not None and start_s <= self._sound_s < self._sent / self._sample_rate
        )
        self._index += 1
        return AudioChunk(
            self._encode(audio),
            self._index - 1,
            last,
            self._sample_rate,
            self._samples_per_token,
            self._samples_trimmed,
            self._sound_s - start_s if begins and self._sound_s is not None else None,
        )

    def _trimmed(self, audio: NDArray[np.float32], last: bool) -> NDArray[np.float32]:
        """Drops whole windows before the first audible one, as many as may be; an incomplete window
        waits.
        """
        if not self._windows_to_trim:
            return audio
        audio = np.concatenate((self._undecided, audio))
        audible = self._audible(audio[: self._windows_to_trim * self._window])
        windows = int(audible.argmax()) if audible.any() else len(audible)
        self._windows_to_trim = 0 if audible.any() else self._windows_to_trim - windows
        # Rounded up, so that the resampler never has too few samples for the sum that was promised.
        dropped = (self._given - len(audio) + windows * self._window) * self._ratio
        self._samples_trimmed = -int(-dropped // 1)
        audio = audio[windows * self._window :]
        self._undecided = np.zeros(0, np.float32)
        if self._windows_to_trim and not last:
            self._undecided, audio = audio, self._undecided
        return audio

    def _audible(self, audio: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Says of each whole window whether it can be heard."""
        count = len(audio) // self._window
        windows = audio[: count * self._window].reshape(count, self._window)
        return np.square(windows).mean(axis=1) >= _AUDIBLE


def _resampler(model_rate: int, sample_rate: int) -> Any:
    try:
        # only where it is needed: a bare machine with torch serves the model's own rate
        import soxr
    except ImportError:
        raise InputError(
            "sample_rate",
            f"{sample_rate} needs the library soxr, which this server lacks; its own is "
            f"{model_rate}",
        ) from None
    return soxr.ResampleStream(model_rate, sample_rate, 1, "float32")
