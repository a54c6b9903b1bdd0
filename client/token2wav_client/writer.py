"""A WAV file that is valid after every chunk: it can be played while it grows, and survives any end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile

from token2wav_client.audio import SAMPLE_RATE, AudioArray
from token2wav_client.errors import OutputError

Subtype = Literal["PCM_16", "FLOAT"]
_PROBE_BYTES = 1 << 16


class WavWriter:
    """Appends chunks to a mono WAV file, created (and an older one replaced) by the first chunk.

    The file is reopened for each chunk, because only closing it brings its header up to date; that costs a
    third of a millisecond.

    Args:
        path: where to write.
        subtype: 16-bit integers, or 32-bit floats.

    Attributes:
        samples: samples written so far.

    Raises:
        OutputError: another format's name, or nothing can be written there; found out before any work is done.
    """

    def __init__(self, path: str | Path, subtype: Subtype = "PCM_16") -> None:
        self.samples = 0
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
        self.samples += len(audio)

    def _open(self, sample_rate: int) -> soundfile.SoundFile:
        if self.samples:
            return soundfile.SoundFile(self._path, "r+")
        return soundfile.SoundFile(
            self._path, "w", samplerate=sample_rate, channels=1, format="WAV", subtype=self._subtype
        )

    def _reason(self, error: Exception) -> str:
        """Why the file system refused, in its own words: libsndfile says "System error", whatever it was."""
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
