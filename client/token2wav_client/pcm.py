"""Samples as they are, without a header, for the next program in a pipe."""

from __future__ import annotations

import sys
from io import FileIO
from typing import Literal

import numpy as np

from token2wav_client.audio import SAMPLE_RATE, AudioArray
from token2wav_client.errors import OutputError

PcmFormat = Literal["s16le", "f32le"]


class PcmWriter:
    """Writes mono samples to standard output, each chunk at once.

    Args:
        sample_format: 16-bit integers or 32-bit floats, little-endian; the names are ffmpeg's.

    Attributes:
        samples: samples written so far.

    Raises:
        OutputError: standard output is a terminal.
    """

    def __init__(self, sample_format: PcmFormat = "s16le") -> None:
        if sys.stdout.isatty():
            raise OutputError("out: samples would go to a terminal; pipe them into a program or a file")
        self.samples = 0
        self._sample_format = sample_format
        self._file = FileIO(sys.stdout.fileno(), "w", closefd=False)  # no buffer to be flushed into a closed pipe

    def write(self, audio: AudioArray, sample_rate: int = SAMPLE_RATE) -> None:
        """Write samples, shape (samples,), float32 in [-1, 1] or int16; who reads them must know their rate.

        Raises:
            OutputError: nobody reads them any more.
        """
        unsent = memoryview(_as_s16le(audio) if self._sample_format == "s16le" else _as_f32le(audio))
        try:
            while unsent:
                unsent = unsent[self._file.write(unsent) :]
        except OSError as error:
            raise OutputError(f"out: cannot write to standard output ({error.strerror})") from None
        self.samples += len(audio)


def _as_s16le(audio: AudioArray) -> bytes:
    if audio.dtype != np.int16:
        audio = np.clip(np.rint(audio * np.float32(32767)), -32768, 32767).astype(np.int16)
    return audio.astype("<i2").tobytes()


def _as_f32le(audio: AudioArray) -> bytes:
    if audio.dtype == np.int16:
        audio = audio.astype(np.float32) / np.float32(32768)
    return audio.astype("<f4").tobytes()
