"""Writers of audio: append to a WAV file that is valid after every chunk, or send samples into a pipe."""

from __future__ import annotations

import os
import sys
from io import FileIO
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile

from token2wav_client.audio import SAMPLE_RATE, AudioArray
from token2wav_client.errors import OutputError

Subtype = Literal["PCM_16", "FLOAT"]
PcmFormat = Literal["s16le", "f32le"]
_PROBE_BYTES = 1 << 16


class WavWriter:
    """Writer of a mono WAV file: appends chunks; the first one creates the file, or replaces an older one.

    The file is reopened for each chunk, because only closing it brings its header up to date; that costs a
    third of a millisecond.

    Args:
        path: where to write.
        subtype: 16-bit integers, or 32-bit floats.

    Raises:
        OutputError: another format's name, or nothing can be written there; found out before any work is done.
    """

    def __init__(self, path: str | Path, subtype: Subtype = "PCM_16") -> None:
        self._begun = False
        self._path = Path(path)
        self._subtype = subtype
        folder = self._path.parent
        if self._path.suffix.lower() != ".wav":
            raise OutputError(
                f"{path}: what can be written is a file that ends in .wav, or samples on standard output (--out -) for "
                "a program that makes other formats"
            )
        if not folder.is_dir():
            raise OutputError(f"{path}: the folder {folder} does not exist")
        if self._path.exists() and not self._path.is_file():
            raise OutputError(f"{path}: exists and is no regular file")
        if not os.access(self._path if self._path.exists() else folder, os.W_OK):
            raise OutputError(f"{path}: no permission to write")

    def write(self, audio: AudioArray, sample_rate: int = SAMPLE_RATE) -> None:
        """Append samples, shape (samples,), float32 in [-1, 1] or int16; louder floats are clipped in PCM_16.

        The first ones say the sample rate of the file.

        Raises:
            OutputError: the file system refused.
        """
        if audio.dtype == np.int16 and self._subtype == "FLOAT":
            audio = audio.astype(np.float32) / np.float32(32768)  # libsndfile would keep the integers' scale
        try:
            with self._open(sample_rate) as file:
                file.seek(0, soundfile.SEEK_END)
                file.write(audio)
        except (OSError, soundfile.SoundFileError) as error:
            raise OutputError(f"{self._path}: cannot write ({self._reason(error)})") from None

    @property
    def samples(self) -> int:
        """Samples in the file, those of a chunk included whose writing was interrupted."""
        return soundfile.info(self._path).frames if self._begun and self._path.is_file() else 0

    def _open(self, sample_rate: int) -> soundfile.SoundFile:
        if self._begun:
            return soundfile.SoundFile(self._path, "r+")
        file = soundfile.SoundFile(
            self._path, "w", samplerate=sample_rate, channels=1, format="WAV", subtype=self._subtype
        )
        self._begun = True
        return file

    def _reason(self, error: Exception) -> str:
        """Find the reason why the file system refused: libsndfile says "System error", whatever it was."""
        try:
            size = self._path.stat().st_size
            try:
                with self._path.open("r+b") as file:
                    file.seek(size)
                    file.write(bytes(_PROBE_BYTES))
            finally:
                os.truncate(self._path, size)
        except OSError as refused:
            return refused.strerror or str(refused)
        return str(error)


class PcmWriter:
    """Writer of mono samples without a header to standard output, each chunk at once.

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
