"""Encoding of audio: from samples to the bytes of a format, while the audio is still arriving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import av
import numpy as np
from numpy.typing import NDArray

from token2wav_client.audio import channels_of

_FIRST_CHUNK = 12  # position in a WAV file
RATE_HZ = 24_000  # OpenAI's rate of `pcm`

Samples = NDArray[np.int16]  # (samples,), or (samples, 2) for two channels
_LAYOUTS = {1: "mono", 2: "stereo"}  # FFmpeg's names, by the number of channels


@dataclass(frozen=True)
class Format:
    """Format of audio.

    Attributes:
        media_type: media type of a response.
        container: name that FFmpeg gives to the container; empty for samples without one.
        codec: name that FFmpeg gives to the codec.
        options: options of the container.
    """

    media_type: str
    container: str = ""
    codec: str = ""
    options: tuple[tuple[str, str], ...] = ()


FORMATS = {
    "pcm": Format("audio/pcm"),
    "wav": Format("audio/wav", "wav", "pcm_s16le"),
    "flac": Format("audio/flac", "flac", "flac"),
    # A page of Ogg is sent when it has 20 ms, not a second, of audio.
    "opus": Format("audio/ogg", "ogg", "libopus", (("page_duration", "20000"),)),
    "mp3": Format("audio/mpeg", "mp3", "libmp3lame", (("write_xing", "0"),)),
}


class _Buffer:
    """File that collects written bytes. FFmpeg writes to it, and never seeks."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._pieces.append(bytes(piece))
        return len(piece)

    def take(self) -> bytes:
        """Returns the bytes that were written since the last call."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class Encoder:
    """Encoder of one utterance.

        encoder = Encoder("opus")
        for samples in chunks:
            send(encoder.encode(samples))
        send(encoder.finish())

    Args:
        name: one of `FORMATS`.
        rate_hz: sample rate; for `opus` 8000, 16000, 24000 or 48000.
    """

    def __init__(self, name: str, rate_hz: int = RATE_HZ) -> None:
        self.format = FORMATS[name]
        self._encode: Callable[[Samples | None], bytes] = _raw
        if self.format.container:
            self._encode = _Container(self.format, rate_hz)

    def encode(self, samples: Samples) -> bytes:
        """Encodes the next samples, and returns the bytes that are complete.

        The first samples decide the number of channels.
        """
        return self._encode(samples)

    def finish(self) -> bytes:
        """Ends the audio, and returns the last bytes."""
        return self._encode(None)


def whole_file(name: str, content: bytes) -> bytes:
    """Returns a file with its length in its header, which a WAV file that is sent in pieces lacks.

    Args:
        name: one of `FORMATS`.
        content: everything that an encoder returned.
    """
    if name != "wav":
        return content
    file, chunk = bytearray(content), _FIRST_CHUNK
    while file[chunk : chunk + 4] != b"data":
        chunk += 8 + int.from_bytes(file[chunk + 4 : chunk + 8], "little")
    for start in (0, chunk):  # the whole file, and the samples
        file[start + 4 : start + 8] = (len(file) - start - 8).to_bytes(4, "little")
    return bytes(file)


def _raw(samples: Samples | None) -> bytes:
    return b"" if samples is None else samples.astype("<i2").tobytes()


class _Container:
    """Container with one audio stream, which FFmpeg writes."""

    def __init__(self, audio_format: Format, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._buffer = _Buffer()
        self._container = av.open(
            self._buffer,
            "w",
            format=audio_format.container,
            options=dict(audio_format.options),
        )
        stream = self._container.add_stream(audio_format.codec, rate=rate_hz)
        assert isinstance(stream, av.AudioStream)
        stream.layout = _LAYOUTS[1]
        self._stream: av.AudioStream = stream
        self._samples = 0

    def __call__(self, samples: Samples | None) -> bytes:
        frame = None
        if samples is not None:
            if not len(samples):
                return self._buffer.take()
            layout = _LAYOUTS[channels_of(samples)]
            if not self._samples:
                self._stream.layout = layout
            row = np.ascontiguousarray(samples).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(row, format="s16", layout=layout)
            frame.rate, frame.pts = self._rate_hz, self._samples
            self._samples += len(samples)
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
        if frame is None:
            self._container.close()
        return self._buffer.take()
