"""The WAV file: right on disk after every chunk, in every combination of formats."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import soundfile

from token2wav_client.audio import AudioArray
from token2wav_client.errors import OutputError
from token2wav_client.writer import Subtype, WavWriter


def declared_bytes(path: Path) -> int:
    """What the header says of the size of the samples; soundfile itself would forgive a stale one."""
    content = path.read_bytes()
    at = content.index(b"data")
    size = int.from_bytes(content[at + 4 : at + 8], "little")
    assert at + 8 + size == len(content)
    assert int.from_bytes(content[4:8], "little") == len(content) - 8
    return size


@pytest.mark.parametrize(("subtype", "sample_bytes"), [("PCM_16", 2), ("FLOAT", 4)])
def test_the_header_is_right_after_every_chunk(tmp_path: Path, subtype: Subtype, sample_bytes: int) -> None:
    path = tmp_path / "out.wav"
    writer = WavWriter(path, subtype)
    assert not path.exists()
    for count in range(1, 4):
        writer.write(np.full(960, 0.25, np.float32))
        assert declared_bytes(path) == count * 960 * sample_bytes
    assert writer.samples == 2880
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.frames, info.subtype) == (24_000, 1, 2880, subtype)


@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_sound_is_the_same_whatever_the_formats(tmp_path: Path, subtype: Subtype, dtype: str) -> None:
    wave = np.linspace(-0.9, 0.9, 1920).astype(np.float32)
    sent: AudioArray = wave if dtype == "float32" else (wave * 32768).astype(np.int16)
    writer = WavWriter(tmp_path / "out.wav", subtype)
    writer.write(sent[:960])
    writer.write(sent[960:])
    heard, _ = soundfile.read(tmp_path / "out.wav")
    np.testing.assert_allclose(heard, wave, atol=1 / 32768)


def test_too_loud_floats_are_clipped_not_wrapped(tmp_path: Path) -> None:
    writer = WavWriter(tmp_path / "out.wav")
    writer.write(np.array([1.5, -1.5], np.float32))
    writer.write(np.array([2.0, -2.0], np.float32))
    heard, _ = soundfile.read(tmp_path / "out.wav")
    np.testing.assert_allclose(heard, [1, -1, 1, -1], atol=1e-4)


def test_an_older_file_is_replaced_and_an_empty_chunk_harmless(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    path.write_bytes(b"something longer than the new file" * 1000)
    writer = WavWriter(path)
    for samples in (0, 960, 0):
        writer.write(np.zeros(samples, np.float32))
    assert declared_bytes(path) == 1920


def test_a_place_that_cannot_be_written_is_known_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        WavWriter(tmp_path / "missing" / "out.wav")
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(OutputError, match="no regular file"):
        WavWriter(tmp_path / "folder.wav")


@pytest.mark.parametrize("name", ["out.mp3", "out.flac", "out", "wav"])
def test_another_format_is_refused_with_what_can_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        OutputError, match=rf"{name}: what can be written is a file that ends in \.wav, or samples on st"
    ):
        WavWriter(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_what_was_written_stays_playable(tmp_path: Path) -> None:
    path = tmp_path / "out.WAV"
    writer = WavWriter(path)
    writer.write(np.zeros(960, np.float32))
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, room[1]))
    try:
        with pytest.raises(OutputError, match=rf"^{path}: cannot write \({os.strerror(errno.EFBIG)}\)$"):
            writer.write(np.zeros(24_000, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
        signal.signal(signal.SIGXFSZ, handler)
    assert writer.samples == declared_bytes(path) // 2 >= 960


def test_a_file_that_vanishes_is_an_error_of_the_output(tmp_path: Path) -> None:
    writer = WavWriter(tmp_path / "out.wav")
    writer.write(np.zeros(960, np.float32))
    (tmp_path / "out.wav").unlink()
    assert writer.samples == 0
    with pytest.raises(OutputError, match="cannot write"):
        writer.write(np.zeros(960, np.float32))
