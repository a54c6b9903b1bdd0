"""Files and pipes: a WAV is valid after every chunk, and every format holds all received audio."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile

from testkit.limits import files_of_at_most
from testkit.patience import until
from token2wav.serving.audio_output import ENCODERS
from token2wav_client.audio import AUDIO_FORMATS, DTYPES, AudioArray, AudioFormat, decoded
from token2wav_client.errors import OutputError
from token2wav_client.writer import FILE_FORMATS, AudioWriter, FileFormat


def spoken(audio_format: AudioFormat) -> AudioArray:
    """Returns a second of a tone at 8 kHz."""
    tone = (0.3 * np.sin(np.arange(8000) / 5)).astype(np.float32)
    return ENCODERS[audio_format](tone)


@contextmanager
def standard_output_in_a_pipe() -> Iterator[int]:
    """Context that replaces standard output by a pipe and yields the pipe's reading end.

    64 KiB fit into the pipe before anybody reads.
    """
    reading, writing = os.pipe()
    standard_output = os.dup(1)
    os.dup2(writing, 1)
    try:
        yield reading
    finally:
        os.dup2(standard_output, 1)
        os.close(standard_output)
        os.close(writing)


def content_of(reading: int) -> bytes:
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


@contextmanager
def interrupted_when(condition: Callable[[], object]) -> Iterator[None]:
    """Context that is interrupted by Ctrl-C when a condition becomes true."""
    handler, main = signal.signal(signal.SIGINT, signal.default_int_handler), threading.get_ident()

    def interrupt() -> None:
        until(condition)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)


def is_full(pipe: int) -> bool:
    """Returns whether the main thread waits because a pipe takes no more bytes."""

    def bytes_in_pipe() -> int:
        count = bytearray(4)
        fcntl.ioctl(pipe, termios.FIONREAD, count)
        return int.from_bytes(count, sys.byteorder)

    before = bytes_in_pipe()
    time.sleep(0.1)
    state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0]
    return before == bytes_in_pipe() > 20_000 and state == "S"


def noise(samples: int) -> AudioArray:
    return np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)


def declared_bytes(path: Path) -> int:
    """Returns the size of the samples according to the header.

    soundfile itself accepts a header with a stale size.
    """
    content = path.read_bytes()
    at = content.index(b"data")
    size = int.from_bytes(content[at + 4 : at + 8], "little")
    assert at + 8 + size == len(content)
    assert int.from_bytes(content[4:8], "little") == len(content) - 8
    return size


def readable_samples(path: Path) -> int:
    """Reads the samples of a possibly truncated file one by one, up to the first error."""
    if path.suffix == ".raw":
        return path.stat().st_size // 4
    count = 0
    with soundfile.SoundFile(path) as file, suppress(soundfile.SoundFileError):
        while samples := len(file.read(256)):
            count += samples
    return count


@pytest.mark.parametrize(
    ("audio_format", "sample_bytes"), [("int16", 2), ("float32", 4), ("mulaw", 1), ("alaw", 1)]
)
def test_the_header_is_right_after_every_chunk(
    tmp_path: Path, audio_format: AudioFormat, sample_bytes: int
) -> None:
    path = tmp_path / "out.wav"
    writer = AudioWriter(path, audio_format)
    assert not path.exists()
    for count in range(1, 4):
        writer.write(np.full(960, 0.25).astype(DTYPES[audio_format]))
        assert declared_bytes(path) == count * 960 * sample_bytes
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.frames) == (24_000, 1, 2880)
    assert (
        info.subtype
        == {"int16": "PCM_16", "float32": "FLOAT", "mulaw": "ULAW", "alaw": "ALAW"}[audio_format]
    )


def written(
    path: Path, sent: AudioArray, audio_format: AudioFormat, kind: FileFormat
) -> tuple[bytes, bytes]:
    """Writes audio in parts, and returns the contents of a file and of a pipe."""
    parts = np.split(sent, [0, 70, 700])
    with AudioWriter(path, audio_format) as writer:
        for part in parts:
            writer.write(part, 8000)
    with standard_output_in_a_pipe() as reading, AudioWriter("-", audio_format, kind) as writer:
        for part in parts:
            writer.write(part, 8000)
    return path.read_bytes(), content_of(reading)


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_files_and_pipes_hold_all_received_audio(
    tmp_path: Path, kind: FileFormat, audio_format: AudioFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    sent, path = spoken(audio_format), tmp_path / f"out.{kind}"
    with capfd.disabled():
        content, piped = written(path, sent, audio_format, kind)
    if kind == "raw":
        assert content == piped == sent.tobytes()
        return
    audio, rate = soundfile.read(path, dtype="float32")
    assert (len(audio), rate) == (len(sent), 8000)
    expected = decoded(sent, audio_format)
    expected = expected if expected.dtype == np.float32 else expected / np.float32(32768)
    if kind in ("wav", "flac"):
        np.testing.assert_allclose(audio, expected, atol=2**-23)
    else:
        assert np.corrcoef(audio, expected)[0, 1] > 0.95
    if kind == "wav":
        # libsndfile writes only one of its zeros
        minus_zero = {0x7F: 0xFF} if audio_format == "mulaw" else {}
        samples = piped.partition(b"data")[2][4:].translate(
            bytes(minus_zero.get(code, code) for code in range(256))
        )
        assert content.partition(b"data")[2][4:] == samples
        assert piped.partition(b"data")[2][:4] == piped[4:8] == b"\xff\xff\xff\xff"
        assert soundfile.info(io.BytesIO(piped)).frames == len(sent)
    elif kind == "flac":  # only FLAC rewrites its header, for sizes and a checksum
        assert (content[:8], content[42:]) == (piped[:8], piped[42:])
    else:
        heard, _ = soundfile.read(io.BytesIO(piped), dtype="float32")
        np.testing.assert_allclose(heard, audio, atol=1e-6)


@pytest.mark.parametrize("kind", ["wav", "flac", "raw"])
def test_two_channels(tmp_path: Path, kind: FileFormat, capfd: pytest.CaptureFixture[str]) -> None:
    sent = (3000 * np.random.default_rng(0).standard_normal((900, 2))).astype(np.int16)
    with capfd.disabled():
        content, piped = written(path := tmp_path / f"out.{kind}", sent, "int16", kind)
    if kind == "raw":
        assert content == piped == sent.tobytes()
        return
    for file in (path, io.BytesIO(piped))[: 1 + (kind == "wav")]:
        audio, rate = soundfile.read(file, dtype="int16")
        assert rate == 8000
        assert np.array_equal(audio, sent)
    assert kind == "wav" or content[42:] == piped[42:]


def test_a_rate_that_a_format_does_not_know(tmp_path: Path) -> None:
    with (
        AudioWriter(tmp_path / "out.bin", "int16", "opus") as writer,
        pytest.raises(OutputError, match="cannot write"),
    ):
        writer.write(np.zeros(9, np.int16), 22_050)


def test_too_loud_floats_are_clipped_not_wrapped(tmp_path: Path) -> None:
    writer = AudioWriter(tmp_path / "out.flac")
    writer.write(np.array([1.5, -1.5], np.float32))
    writer.write(np.array([2.0, -2.0], np.float32))
    writer.close()
    heard, _ = soundfile.read(tmp_path / "out.flac")
    np.testing.assert_allclose(heard, [1, -1, 1, -1], atol=1e-4)


def test_an_older_file_is_replaced_and_an_empty_chunk_harmless(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    path.write_bytes(b"something longer than the new file" * 1000)
    writer = AudioWriter(path, "int16")
    for samples in (0, 960, 0):
        writer.write(np.zeros(samples, np.int16))
    assert declared_bytes(path) == 1920


@pytest.mark.parametrize("kind", ["flac", "ogg", "opus"])
def test_a_file_without_samples_is_no_error(kind: FileFormat, tmp_path: Path) -> None:
    with AudioWriter(tmp_path / f"out.{kind}") as writer:
        writer.write(np.zeros(0, np.float32))


def test_an_unwritable_path_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        AudioWriter(tmp_path / "missing" / "out.wav")
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(OutputError, match="exists and is not a regular file"):
        AudioWriter(tmp_path / "folder.wav")


@pytest.mark.parametrize("name", ["out.mp3", "out", "wav"])
def test_unknown_formats_are_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        OutputError,
        match=rf"{name}: the name ends in none of \.wav, \.flac, \.ogg, \.opus, \.raw; set",
    ):
        AudioWriter(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_audio_on_a_full_disk_stays_playable(kind: FileFormat, tmp_path: Path) -> None:
    """The error is that of the write, not the one of closing an incomplete file after it."""
    path = tmp_path / f"out.{kind}"
    message = re.escape(f"cannot write ({os.strerror(errno.EFBIG)})")
    writer = AudioWriter(path)
    with files_of_at_most(20_000), pytest.raises(OutputError, match=message), writer:
        writer.write(noise(240_000))
    assert path.stat().st_size == 20_000
    assert readable_samples(path) > 1000
    assert kind != "wav" or declared_bytes(path) == 4 * readable_samples(path)


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_a_disk_without_any_room(kind: FileFormat, tmp_path: Path) -> None:
    writer = AudioWriter(tmp_path / f"out.{kind}")
    with files_of_at_most(0), pytest.raises(OutputError, match="cannot write"), writer:
        writer.write(noise(240_000))


@pytest.mark.parametrize("kind", ["flac", "ogg", "opus"])
def test_a_disk_that_is_full_for_the_last_bytes_is_named(kind: FileFormat, tmp_path: Path) -> None:
    whole, path = tmp_path / f"whole.{kind}", tmp_path / f"out.{kind}"
    with AudioWriter(whole) as writer:
        writer.write(noise(24_000))
    message = re.escape(f"cannot write ({os.strerror(errno.EFBIG)})")
    with (
        files_of_at_most(whole.stat().st_size - 1),
        pytest.raises(OutputError, match=message),
        AudioWriter(path) as writer,
    ):
        writer.write(noise(24_000))


@pytest.mark.parametrize("kind", ["flac", "ogg", "opus"])
def test_an_interrupt_while_encoding_keeps_received_audio(kind: FileFormat, tmp_path: Path) -> None:
    path, audio = tmp_path / f"out.{kind}", noise(48_000)

    def has_begun() -> bool:
        return path.exists() and path.stat().st_size > 50_000

    written = 0
    with interrupted_when(has_begun), AudioWriter(path) as writer:
        for _ in range(2000):
            writer.write(audio)
            written += len(audio)
    heard, _ = soundfile.read(path)
    # the chunk that was interrupted may be there
    assert len(heard) - written in (0, len(audio))
    assert len(heard) > 0


@pytest.mark.parametrize("kind", ["flac", "ogg", "opus"])
def test_an_interrupted_write_to_a_full_pipe(
    kind: FileFormat, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, audio = tmp_path / f"out.{kind}", noise(24_000 * 20)
    with AudioWriter(path) as writer:
        writer.write(audio)
    with ThreadPoolExecutor() as threads:
        with capfd.disabled(), standard_output_in_a_pipe() as reading:
            writer = AudioWriter("-", file_format=kind)
            with interrupted_when(lambda: is_full(reading)):
                writer.write(audio)  # waits, because nobody reads
            piped = threads.submit(content_of, reading)
            writer.close()
        sent, whole = piped.result(), path.read_bytes()
    assert len(sent) == len(whole) > 1 << 16
    if kind == "flac":  # in a pipe, the header stays as it was written at the beginning
        assert sent[42:] == whole[42:]
    else:  # each Ogg stream has its own number, which is part of its checksums
        (heard, _), (expected, _) = soundfile.read(io.BytesIO(sent)), soundfile.read(path)
        np.testing.assert_array_equal(heard, expected)


def test_a_file_that_vanishes_is_an_error_of_the_output(tmp_path: Path) -> None:
    writer = AudioWriter(tmp_path / "out.wav")
    writer.write(np.zeros(960, np.float32))
    (tmp_path / "out.wav").unlink()
    with pytest.raises(OutputError, match="cannot write"):
        writer.write(np.zeros(960, np.float32))
