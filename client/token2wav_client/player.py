"""Playback of an utterance while it arrives, through the optional library sounddevice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

from token2wav_client.audio import SAMPLE_RATE, AudioArray, AudioFormat, channels_of, decoded
from token2wav_client.errors import OutputError

# Audio that the device buffers before playback starts. It covers variations in the arrival of
# chunks.
_LATENCY_S = 0.3
_MISSING = 'play: the library sounddevice is missing; run: pip install "token2wav[play]"'


class Player(AbstractContextManager["Player"]):
    """Player of samples in one format on the default audio device.

    Use it in a `with` statement. At the end of the block the player waits until all samples were
    played. If an exception leaves the block, the player stops at once. Raises OutputError if
    sounddevice, PortAudio or an audio device is missing.
    """

    def __init__(self, audio_format: AudioFormat) -> None:
        try:
            import sounddevice
        except ImportError:
            raise OutputError(_MISSING) from None
        except OSError:  # sounddevice is installed, but the library PortAudio is not
            raise OutputError(
                "play: sounddevice does not find PortAudio; run: apt-get install libportaudio2"
            ) from None
        self._audio_format = audio_format
        self._error: type[Exception] = sounddevice.PortAudioError
        dtype = "float32" if audio_format == "float32" else "int16"
        self._open_stream = partial(sounddevice.OutputStream, dtype=dtype, latency=_LATENCY_S)
        self._sample_rate, self._channels = SAMPLE_RATE, 1
        self._stream = self._started()

    def _started(self) -> Any:
        try:
            stream = self._open_stream(samplerate=self._sample_rate, channels=self._channels)
            stream.start()
        except self._error as error:
            raise OutputError(
                f"play: no audio device can play {self._sample_rate} Hz ({error})"
            ) from None
        return stream

    def write(self, audio: AudioArray, sample_rate: int = SAMPLE_RATE) -> None:
        """Plays samples, shape (samples,) or (samples, channels), after all earlier samples. It
        waits while the buffer is full. Raises OutputError if the device is gone, or does not
        support the sample rate or the channels.
        """
        # The constructor opened the device for one channel at the usual rate, but the samples may
        # have two channels or another rate.
        channels = channels_of(audio)
        if (sample_rate, channels) != (self._sample_rate, self._channels):
            self._stream.stop()
            self._stream.close()
            self._sample_rate, self._channels = sample_rate, channels
            self._stream = self._started()
        try:
            self._stream.write(decoded(audio, self._audio_format).reshape(-1, channels))
        except self._error as error:
            raise OutputError(f"play: the audio device failed ({error})") from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._stream.stop()
        else:
            self._stream.abort()
        self._stream.close()
