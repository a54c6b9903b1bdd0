"""Encoding of audio: from samples to the bytes of a format, while the audio is still arriving."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from token2wav_client.audio import AudioFormat, channels_of

RATE_HZ = 24_000  # OpenAI's rate of `pcm`

Samples = NDArray[Any]  # (samples,), or (samples, 2) for two channels
_LAYOUTS = {1: "mono", 2: "stereo"}  # FFmpeg's names, by the number of channels


@dataclass(frozen=True)
class Format:
    """Format of audio.

    Attributes:
        media_type: media type of a response.
        container: name that FFmpeg gives to the container; empty for samples without one.
        codec: name that FFmpeg gives to the codec.
        options: options of the container.
        samples: format of the samples that the speech server sends.
        rates_hz: sample rates that a client may choose.
        rate_hz: rate if it chooses none.
        mono: whether the format has one channel only.
    """

    media_type: str
    container: str = ""
    codec: str = ""
    options: tuple[tuple[str, str], ...] = ()
    samples: AudioFormat = "int16"
    rates_hz: tuple[int, ...] = (8000, 16000, 22050, 24000, 44100, 48000)
    rate_hz: int = RATE_HZ
    mono: bool = False

    def check_rate(self, rate_hz: int) -> None:
        """Raises ValueError for a rate that a client may not choose."""
        if rate_hz not in self.rates_hz:
            raise ValueError(f"{rate_hz} is not one of {', '.join(map(str, self.rates_hz))}")


FORMATS = {
    # Nothing in samples says how many channels they have.
    "pcm": Format("audio/pcm", mono=True),
    # Without the name of FFmpeg, the header has the 44 bytes that many clients cut off.
    "wav": Format("audio/wav", "wav", "pcm_s16le", (("fflags", "+bitexact"),)),
    "flac": Format("audio/flac", "flac", "flac"),
    # A page of Ogg is sent when it has 20 ms, not a second, of audio.
    "opus": Format(
        "audio/ogg",
        "ogg",
        "libopus",
        (("page_duration", "20000"),),
        rates_hz=(8000, 16000, 24000, 48000),
    ),
    "mp3": Format("audio/mpeg", "mp3", "libmp3lame"),
    "aac": Format("audio/aac", "adts", "aac"),
    # G.711 of telephones
    "pcmu": Format("audio/pcmu", "mulaw", "pcm_mulaw", rates_hz=(8000,), rate_hz=8000, mono=True),
    "pcma": Format("audio/pcma", "alaw", "pcm_alaw", rates_hz=(8000,), rate_hz=8000, mono=True),
}
FLOATS = Format("", samples="float32")  # of Triton's tensors


class _Pieces:
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
        audio_format: one of `FORMATS` by its name, or another format.
        rate_hz: sample rate, one of those of the format; None for its default.
        whole: whether `finish` returns everything, as a file whose header has its length.
            Otherwise the header has no length, because it is sent before the audio is complete.
        mono: whether several channels are mixed down to one, as in formats of one channel.
    """

    def __init__(
        self,
        audio_format: str | Format,
        rate_hz: int | None = None,
        *,
        whole: bool = False,
        mono: bool = False,
    ) -> None:
        self.format = FORMATS[audio_format] if isinstance(audio_format, str) else audio_format
        self.rate_hz = rate_hz or self.format.rate_hz
        self._mono = mono or self.format.mono
        self._file = io.BytesIO() if whole else _Pieces()
        self._container: _Container | None = None
        if self.format.container:
            self._container = _Container(self._file, self.format, self.rate_hz)

    @property
    def media_type(self) -> str:
        """Media type of a response. Only that of bare samples has their rate, if it is unusual."""
        name = self.format.media_type
        usual = self.format.container or self.rate_hz == self.format.rate_hz
        return name if usual else f"{name};rate={self.rate_hz}"

    def encode(self, samples: Samples) -> bytes:
        """Encodes the next samples, and returns the bytes that are complete.

        The first samples decide the number of channels.
        """
        if self._mono:
            samples = mixed_down(samples)
        if self._container is None:
            self._file.write(samples.tobytes())
        elif len(samples):
            self._container.write(samples)
        return self._file.take() if isinstance(self._file, _Pieces) else b""

    def finish(self) -> bytes:
        """Ends the audio, and returns the last bytes."""
        if self._container is not None:
            self._container.close()
        return self._file.take() if isinstance(self._file, _Pieces) else self._file.getvalue()


def mixed_down(samples: Samples) -> Samples:
    """Returns the mean of all channels, (samples,)."""
    if samples.ndim == 1:
        return samples
    mean = samples.mean(axis=1)
    return (mean if samples.dtype.kind == "f" else np.rint(mean)).astype(samples.dtype)


class _Container:
    """Container with one audio stream, which FFmpeg writes.

    If the file can seek, FFmpeg at last writes the length into the header, and into that of an MP3
    file also the delay of the encoder.
    """

    def __init__(self, file: io.BytesIO | _Pieces, audio_format: Format, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._container = av.open(
            file,
            "w",
            format=audio_format.container,
            options=dict(audio_format.options),
        )
        stream = self._container.add_stream(audio_format.codec, rate=rate_hz)
        assert isinstance(stream, av.AudioStream)
        stream.layout = _LAYOUTS[1]
        self._stream: av.AudioStream = stream
        self._samples = 0

    def write(self, samples: Samples) -> None:
        layout = _LAYOUTS[channels_of(samples)]
        if not self._samples:
            self._stream.layout = layout
        row = np.ascontiguousarray(samples).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(row, format="s16", layout=layout)
        frame.rate, frame.pts = self._rate_hz, self._samples
        self._samples += len(samples)
        self._mux(frame)

    def close(self) -> None:
        self._mux(None)
        self._container.close()

    def _mux(self, frame: av.AudioFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
