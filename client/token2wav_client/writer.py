"""Writer of audio: appends chunks to a file or a pipe, as WAV, FLAC, Ogg or bare samples."""

from __future__ import annotations

import io
import os
import select
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import IO, Literal, get_args

import soundfile

from token2wav_client.audio import DTYPES, SAMPLE_RATE, SUBTYPES, AudioArray, AudioFormat, decoded
from token2wav_client.errors import OutputError

FileFormat = Literal["wav", "flac", "ogg", "opus", "raw"]
FILE_FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
STANDARD_OUTPUT = "-"
# kind, subtype
_ENCODED = {"flac": ("FLAC", "PCM_16"), "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS")}
_UNKNOWN_SIZE = b"\xff\xff\xff\xff"  # in a WAV header: to the end
_PROBE_BYTES = 1 << 16
# of a read; where a file breaks off, the samples of the last read are not counted
_BLOCK_SAMPLES = 256


class AudioWriter(AbstractContextManager["AudioWriter"]):
    """Writer of mono audio: appends chunks; the first one creates the file, or replaces an older
    one.

    A WAV file is valid after every chunk: it is reopened for each, because only closing it brings
    its header up to date; that costs a third of a millisecond. FLAC and Ogg are complete once the
    writer is closed. WAV and bare samples have the format in which audio comes, others the nearest
    one that they know.

    Args:
        out: where to write; - for standard output.
        audio_format: of the samples that will be given.
        file_format: of the file; by default what its name ends in, and bare samples (raw) for
            standard output.

    Raises:
        OutputError: it cannot write there, found out before any work is done, or not any more.
    """

    def __init__(
        self,
        out: str | Path,
        audio_format: AudioFormat = "float32",
        file_format: FileFormat | None = None,
    ) -> None:
        if not str(out):
            raise OutputError("out: the name of the file is empty")
        self._path = None if str(out) == STANDARD_OUTPUT else Path(out)
        self._audio_format = audio_format
        self._format = file_format or _format_of(self._path)
        self._samples = 0
        self._begun = False
        self._files = ExitStack()  # of `_out` and `_encoded`, once they are open
        self._encoder: soundfile.SoundFile | None = None
        self._passed_on = 0  # bytes
        if self._path is not None:
            _check_place(self._path)
        elif sys.stdout.isatty():
            raise OutputError(
                "out: samples would go to a terminal; pipe them into a program or a file"
            )

    @property
    def samples(self) -> int:
        """Samples written; of a file those in it, which FLAC and Ogg keep once the writer is
        closed.

        A chunk whose writing failed or was interrupted may be there in part.
        """
        if self._path is None or self._encoder is not None:
            return self._samples
        if not (self._begun and self._path.is_file()):
            return 0
        if self._format == "raw":
            return self._path.stat().st_size // DTYPES[self._audio_format].itemsize
        return _samples_in(self._path)

    def write(self, audio: AudioArray, sample_rate: int = SAMPLE_RATE) -> None:
        """Append samples, shape (samples,), in the format that was announced; floats beyond [-1, 1]
        may be clipped.

        The first ones say the sample rate of the file, which its format may not know.
        """
        try:
            self._write(audio, sample_rate)
        except (OSError, soundfile.SoundFileError) as error:
            raise self._error(error) from None
        self._samples += len(audio)

    def close(self) -> None:
        """Complete the file. Closing twice is harmless."""
        encoder, self._encoder = self._encoder, None
        try:
            with self._files:
                if encoder is not None:
                    encoder.close()
                    self._pass_on()
                    if self._samples:
                        self._check_encoded()
        except (OSError, soundfile.SoundFileError) as error:
            raise self._error(error) from None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, audio: AudioArray, sample_rate: int) -> None:
        if self._format in _ENCODED:
            if self._encoder is None:
                kind, subtype = _ENCODED[self._format]
                if self._format == "flac" and self._audio_format == "float32":
                    subtype = "PCM_24"
                # No file of Python's: an exception that a signal raises would be lost in
                # libsndfile's callback.
                target = self._path or self._encoded.fileno()
                self._encoder = soundfile.SoundFile(
                    target,
                    "w",
                    sample_rate,
                    channels=1,
                    subtype=subtype,
                    format=kind,
                    closefd=False,
                )
                self._begun = True
            self._encoder.write(decoded(audio, self._audio_format))
            self._pass_on()
        elif self._format == "wav" and self._path is not None:
            self._append_to_wav(self._path, audio, sample_rate)
        else:
            out = self._out
            if not self._begun:
                self._begun = True
                if self._format == "wav":
                    _write_all(out, _endless_header(sample_rate, SUBTYPES[self._audio_format]))
            _write_all(out, audio.astype(audio.dtype.newbyteorder("<"), copy=False).tobytes())

    @cached_property
    def _out(self) -> FileIO:
        # No buffer, which would be flushed into a closed pipe.
        return self._files.enter_context(
            FileIO(self._path or sys.stdout.fileno(), "w", closefd=self._path is not None)
        )

    @cached_property
    def _encoded(self) -> IO[bytes]:
        """Temporary file that is encoded into for a pipe: an encoder goes back to its header, and a
        pipe does not.
        """
        return self._files.enter_context(tempfile.TemporaryFile(buffering=0))

    def _pass_on(self) -> None:
        """Write to standard output what the encoder added; what it changes in its header at the end
        is lost.
        """
        if self._path is None:
            # A pipe takes so much at once or nothing, so what a write has sent is known even where
            # a signal ended it.
            while piece := os.pread(self._encoded.fileno(), select.PIPE_BUF, self._passed_on):
                self._passed_on += self._out.write(piece) or 0

    def _check_encoded(self) -> None:
        """Raise if samples are missing: libsndfile reports no error of the last bytes, which it
        writes on closing.
        """
        if self._path is None:
            self._encoded.seek(0)
        with soundfile.SoundFile(self._path or self._encoded.fileno(), closefd=False) as file:
            # which stands for a FLAC that was not completed
            if not self._samples <= file.frames < sys.maxsize:
                raise soundfile.SoundFileError("samples are missing")

    def _append_to_wav(self, path: Path, audio: AudioArray, sample_rate: int) -> None:
        if self._begun:
            file = soundfile.SoundFile(path, "r+")
        else:
            subtype = SUBTYPES[self._audio_format]
            file = soundfile.SoundFile(
                path, "w", samplerate=sample_rate, channels=1, format="WAV", subtype=subtype
            )
            self._begun = True
        with file:
            file.seek(0, soundfile.SEEK_END)
            file.write(decoded(audio, self._audio_format))

    def _error(self, error: Exception) -> OutputError:
        reason = error.strerror if isinstance(error, OSError) else None
        if self._path is None:
            return OutputError(f"out: cannot write to standard output ({reason or error})")
        return OutputError(
            f"{self._path}: cannot write ({reason or _refusal(self._path) or error})"
        )


def _samples_in(path: Path) -> int:
    """Count the samples that can be read from a WAV, FLAC or Ogg file, which may be incomplete."""
    count = 0
    # an error ends what can be read
    with suppress(soundfile.SoundFileError), soundfile.SoundFile(path) as file:
        if file.frames < sys.maxsize:
            return int(file.frames)
        # a FLAC that was not completed, and says no length
        while samples := len(file.read(_BLOCK_SAMPLES, "int16")):
            count += samples
    return count


def _write_all(file: FileIO, data: bytes) -> None:
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[file.write(unsent) :]


def _endless_header(sample_rate: int, subtype: str) -> bytes:
    """Make the header of a WAV that has no end yet."""
    file = io.BytesIO()
    soundfile.SoundFile(
        file, "w", samplerate=sample_rate, channels=1, format="WAV", subtype=subtype
    ).close()
    header = file.getvalue()
    return header[:4] + _UNKNOWN_SIZE + header[8:-4] + _UNKNOWN_SIZE


def _format_of(path: Path | None) -> FileFormat:
    if path is None:
        return "raw"
    for known in FILE_FORMATS:
        if path.suffix.lower() == f".{known}":
            return known
    endings = ", ".join(f".{known}" for known in FILE_FORMATS)
    raise OutputError(
        f"{path}: ends in none of {endings}; say the format, or write to standard output (--out -)"
    )


def _check_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is no regular file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path}: no permission to write")


def _refusal(path: Path) -> str | None:
    """Find the reason why the file system refused: libsndfile says "System error", whatever it was."""
    try:
        size = path.stat().st_size
        try:
            with path.open("r+b") as file:
                file.seek(size)
                file.write(bytes(_PROBE_BYTES))
        finally:
            os.truncate(path, size)
    except OSError as refused:
        return refused.strerror or str(refused)
    return None
