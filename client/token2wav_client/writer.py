"""Writer of audio: appends chunks to a file or a pipe, as WAV, FLAC, Ogg or raw samples."""

from __future__ import annotations

import io
import os
import select
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import IO, Literal, get_args

import soundfile

from token2wav_client.audio import (
    SAMPLE_RATE,
    SUBTYPES,
    AudioArray,
    AudioFormat,
    channels_of,
    decoded,
)
from token2wav_client.errors import OutputError

FileFormat = Literal["wav", "flac", "ogg", "opus", "raw"]
FILE_FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
STANDARD_OUTPUT = "-"
# libsndfile's container format and subtype of each compressed file format.
_ENCODED = {"flac": ("FLAC", "PCM_16"), "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS")}
# Size fields in the header of a WAV file that continues to the end of the stream.
_UNKNOWN_SIZE = b"\xff\xff\xff\xff"
_PROBE_BYTES = 1 << 16


class AudioWriter(AbstractContextManager["AudioWriter"]):
    """Writer of audio in chunks. The first chunk creates the file or replaces an older one.

    A WAV file is valid after every chunk. Only closing a file updates its header, so the writer
    reopens the file for each chunk, which costs a third of a millisecond. FLAC and Ogg files are
    complete only after the writer is closed. WAV and raw files store samples in the format in which
    they arrive; the other file formats store them in their nearest own format.

    Args:
        out: path of the file; - for standard output.
        file_format: format of the file. By default it follows from the suffix of `out`; for
            standard output it is raw.

    Attributes:
        lacks_audio: whether closing the file failed, so that it may lack audio of earlier chunks.

    Raises:
        OutputError: the output cannot be written. The constructor checks this before any work is
            done; later methods raise it if writing fails.
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
        self._samples = 0  # of a channel, in all chunks
        self._channels = 1
        self.lacks_audio = False
        self._begun = False
        self._files = ExitStack()  # closes `_out` and `_encoded` if they were opened
        self._encoder: soundfile.SoundFile | None = None
        self._copied_bytes = 0  # from `_encoded` to standard output
        if self._path is not None:
            _check_path(self._path)
        elif sys.stdout.isatty():
            raise OutputError(
                "out: standard output is a terminal; pipe the samples into a program or a file"
            )

    def write(self, audio: AudioArray, sample_rate: int = SAMPLE_RATE) -> None:
        """Appends samples of shape (samples,) or (samples, channels), in the `audio_format` of the
        constructor.

        Floats outside [-1, 1] may be clipped. The sample rate and the channels of the first chunk
        become those of the file. Some file formats do not support every rate.
        """
        if not self._begun:
            self._channels = channels_of(audio)
        try:
            self._write(audio, sample_rate)
        except (OSError, soundfile.SoundFileError) as error:
            raise self._error(error) from None
        self._samples += len(audio)

    def close(self) -> None:
        """Completes the file. Further calls have no effect."""
        encoder, self._encoder = self._encoder, None
        try:
            with self._files:
                if encoder is not None:
                    encoder.close()
                    self._pass_on()
                    if self._samples:
                        self._check_encoded()
        except (OSError, soundfile.SoundFileError) as error:
            self.lacks_audio = True
            raise self._error(error) from None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # An error that leaves the block says more than one that closing the file raises after it.
        with suppress(OutputError) if kind else nullcontext():
            self.close()

    def _write(self, audio: AudioArray, sample_rate: int) -> None:
        if self._format in _ENCODED:
            if self._encoder is None:
                container, subtype = _ENCODED[self._format]
                if self._format == "flac" and self._audio_format == "float32":
                    subtype = "PCM_24"
                # The target is a path or a file descriptor. If it were a Python file, libsndfile
                # would call methods of the file, and an exception that a signal raises in such a
                # call would be lost.
                target = self._path or self._encoded.fileno()
                self._encoder = self._created(target, sample_rate, container, subtype)
            self._encoder.write(decoded(audio, self._audio_format))
            self._pass_on()
        elif self._format == "wav" and self._path is not None:
            self._append_to_wav(self._path, audio, sample_rate)
        else:
            out = self._out
            if not self._begun:
                self._begun = True
                if self._format == "wav":
                    _write_all(out, self._endless_header(sample_rate))
            _write_all(out, audio.astype(audio.dtype.newbyteorder("<"), copy=False).tobytes())

    @cached_property
    def _out(self) -> FileIO:
        # The file has no buffer, because a buffer would be flushed into a closed pipe.
        return self._files.enter_context(
            FileIO(self._path or sys.stdout.fileno(), "w", closefd=self._path is not None)
        )

    @cached_property
    def _encoded(self) -> IO[bytes]:
        """Temporary file for the encoder if the output is standard output.

        An encoder seeks back to the header of its file, and a pipe does not support seeking.
        """
        return self._files.enter_context(tempfile.TemporaryFile(buffering=0))

    def _pass_on(self) -> None:
        """Copies new bytes of the encoder to standard output.

        Changes that the encoder makes to the header at the end are not copied.
        """
        if self._path is None:
            # A pipe accepts a write of this size completely or not at all. The number of bytes sent
            # is therefore known even if a signal interrupts a write.
            while piece := os.pread(self._encoded.fileno(), select.PIPE_BUF, self._copied_bytes):
                self._copied_bytes += self._out.write(piece) or 0

    def _check_encoded(self) -> None:
        """Raises an error if samples are missing in the encoded file.

        libsndfile writes the last bytes on closing and does not report errors there.
        """
        if self._path is None:
            self._encoded.seek(0)
        with soundfile.SoundFile(self._path or self._encoded.fileno(), closefd=False) as file:
            # sys.maxsize is the length that libsndfile reports for an incomplete FLAC file.
            if not self._samples <= file.frames < sys.maxsize:
                raise soundfile.SoundFileError("the file lacks samples that were written")

    def _append_to_wav(self, path: Path, audio: AudioArray, sample_rate: int) -> None:
        if self._begun:
            file = soundfile.SoundFile(path, "r+")
        else:
            file = self._created(path, sample_rate, "WAV", SUBTYPES[self._audio_format])
        with file:
            file.seek(0, soundfile.SEEK_END)
            file.write(decoded(audio, self._audio_format))

    def _endless_header(self, sample_rate: int) -> bytes:
        """Returns the header of a WAV stream of unknown length."""
        file = io.BytesIO()
        self._created(file, sample_rate, "WAV", SUBTYPES[self._audio_format]).close()
        header = file.getvalue()
        return header[:4] + _UNKNOWN_SIZE + header[8:-4] + _UNKNOWN_SIZE

    def _created(
        self, target: Path | int | io.BytesIO, sample_rate: int, container: str, subtype: str
    ) -> soundfile.SoundFile:
        """Creates a file of libsndfile. Its rate and its channels are those of the first chunk."""
        file = soundfile.SoundFile(
            target, "w", sample_rate, self._channels, subtype, format=container, closefd=False
        )
        self._begun = True
        return file

    def _error(self, error: Exception) -> OutputError:
        reason = error.strerror if isinstance(error, OSError) else None
        if self._path is None:
            return OutputError(f"out: cannot write to standard output ({reason or error})")
        return OutputError(
            f"{self._path}: cannot write ({reason or _refusal(self._path) or error})"
        )


def _write_all(file: FileIO, data: bytes) -> None:
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[file.write(unsent) :]


def _format_of(path: Path | None) -> FileFormat:
    if path is None:
        return "raw"
    for file_format in FILE_FORMATS:
        if path.suffix.lower() == f".{file_format}":
            return file_format
    endings = ", ".join(f".{file_format}" for file_format in FILE_FORMATS)
    raise OutputError(
        f"{path}: the name ends in none of {endings}; set the format (--format), or write "
        "to standard output (--out -)"
    )


def _check_path(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is not a regular file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path}: no permission to write")


def _refusal(path: Path) -> str | None:
    """Returns why the file system refused a write; libsndfile reports only "System error"."""
    try:
        size = path.stat().st_size
        try:
            with path.open("r+b") as file:
                file.seek(size)
                file.write(bytes(_PROBE_BYTES))
        finally:
            os.truncate(path, size)
    except OSError as error:
        return error.strerror or str(error)
    return None
