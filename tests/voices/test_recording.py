"""Every recording that is refused, with the file and the bound in one sentence, and recordings that
just pass.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.voices.material import WriteWav, speechlike
from token2wav_voice import Recording, RecordingError
from token2wav_voice.recording import FULL_RATE_HZ, MIN_RMS_DBFS


def refused(path: Path, message: str, **part: float) -> None:
    with pytest.raises(RecordingError) as error:
        Recording.load(path, **part)
    text = str(error.value)
    assert re.fullmatch(f"{re.escape(str(path))}: {message}", text), text
    assert "\n" not in text


def test_no_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.wav", "no such file")
    refused(tmp_path, "no such file")


@pytest.mark.parametrize("name", ["x.wav", "x.raw", "x.mp3", "x"])
def test_files_without_audio_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    refused(path, "empty, 0 bytes")
    path.write_bytes(b"not audio" * 1000)
    refused(path, r"cannot be read as audio \(.+\)")


def header_without_length(path: Path) -> None:
    """Makes a header like that of a program that has written to a pipe."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".flac":  # the number of samples, and the MD5
        content[21] &= 0xF0
        content[22:42] = bytes(20)
    else:
        content[4:8] = content[40:44] = bytes(4) if path.stem == "zero" else b"\xff" * 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["pipe.flac", "zero.wav", "full.wav", "with-length.wav"])
def test_a_part_of_a_recording(name: str, write_wav: WriteWav) -> None:
    signal = speechlike(2, 24_000)
    path = write_wav(signal, 24_000, name, "PCM_16")
    if name != "with-length.wav":
        header_without_length(path)
    whole = Recording.load(path).samples
    np.testing.assert_allclose(whole, signal, atol=1e-4)
    part = Recording.load(path, start_s=0.5, end_s=1.25).samples
    np.testing.assert_array_equal(part, whole[12_000:30_000])
    np.testing.assert_array_equal(Recording.load(path, start_s=1).samples, whole[24_000:])
    refused(path, "start: 2 s, but the recording is 2.00 s long", start_s=2)
    refused(path, "end: 2.5 s, but the recording is 2.00 s long", end_s=2.5)
    refused(path, "end: 1 s, but the start is at 1 s", start_s=1, end_s=1)
    refused(path, "too short: 2.00 s; at least 3 s is needed", min_seconds=3)


@pytest.mark.parametrize("end", [{}, {"end_s": 31.0}])
def test_a_long_recording_without_a_length_is_not_read_to_its_end(
    end: dict[str, float], write_wav: WriteWav
) -> None:
    path = write_wav(np.resize(speechlike(1, 16_000), 640_000), 16_000, "long.flac", "PCM_16")
    header_without_length(path)
    refused(path, "too long: more than 30 s; at most 30 s can be used; .+", **end)
    assert Recording.load(path, start_s=8, end_s=38).seconds == 30


@pytest.mark.parametrize(
    ("name", "container", "codec", "rate"),
    [
        ("voice.m4a", "ipod", "aac", 24_000),
        ("voice.mp4", "mp4", "aac", 24_000),
        ("voice.webm", "webm", "libopus", 48_000),
        ("voice.aac", "adts", "aac", 24_000),
        ("voice.mov", "mov", "pcm_s16le", 24_000),
        ("no-suffix", "mp4", "aac", 24_000),
    ],
)
def test_recordings_of_telephones_and_browsers(
    name: str, container: str, codec: str, rate: int, tmp_path: Path
) -> None:
    signal, path = speechlike(2, 24_000), tmp_path / name
    stereo = np.stack([signal, signal], axis=1)
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, rate=24_000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(stereo.reshape(1, -1), format="flt", layout="stereo")
        frame.rate = 24_000
        file.mux([*stream.encode(frame), *stream.encode(None)])
    recording = Recording.load(path)
    assert (recording.rate_hz, recording.channels) == (rate, 2)
    assert 2 <= recording.seconds < 2.15  # encoders pad to whole frames
    assert recording.rms_dbfs == pytest.approx(20 * np.log10(0.07), abs=1)


def test_a_playlist_reads_no_other_file(tmp_path: Path, write_wav: WriteWav) -> None:
    other = write_wav(speechlike(1, 24_000), 24_000)
    playlist = tmp_path / "list.m4a"
    playlist.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n")
    refused(playlist, r"cannot be read as audio \(.+\)")


def test_a_file_that_was_cut_off(write_wav: WriteWav) -> None:
    path = write_wav(speechlike(2, 24_000), 24_000, "cut.flac", "PCM_16")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(
        path,
        r"(cut off: \d+ samples fewer than the header announces|cannot be read as audio \(.+\))",
    )


@pytest.mark.parametrize(("rate", "top"), [(8_000, 4_000), (11_025, 5_512), (15_999, 7_999)])
def test_low_rates(rate: int, top: int, write_wav: WriteWav) -> None:
    refused(
        write_wav(speechlike(1, rate), rate),
        f"{rate} Hz; at least 16000 Hz is needed, because frequencies "
        f"above {top} Hz are missing in the recording",
    )


@pytest.mark.parametrize(
    ("rate", "name", "subtype"),
    [
        (1_000_000, "ref.wav", "FLOAT"),
        (2_000_000, "bomb.caf", "ALAC_16"),
        (400_000, "full.wav", "PCM_16"),  # FFmpeg reads it
    ],
)
def test_high_rates(rate: int, name: str, subtype: str, write_wav: WriteWav) -> None:
    """A constant signal takes hardly any bytes in ALAC, so 400 KiB have 10 s at 2 MHz."""
    path = write_wav(np.full(rate, 0.25, np.float32), rate, name, subtype)
    if name == "full.wav":
        header_without_length(path)
    refused(path, f"{rate} Hz; at most 384000 Hz can be used")


def test_a_rate_below_that_of_the_model_is_noted(write_wav: WriteWav) -> None:
    (note,) = Recording.load(write_wav(speechlike(1, 16_000), 16_000)).notes
    assert note.endswith(
        "16000 Hz, so the voice has nothing above 8000 Hz; 24000 Hz or more is better"
    )
    assert not Recording.load(write_wav(speechlike(1, FULL_RATE_HZ), FULL_RATE_HZ)).notes


def test_length(write_wav: WriteWav) -> None:
    long = write_wav(np.resize(speechlike(1, 16_000), 480_160), 16_000, "long.wav", "PCM_16")
    refused(
        long, "too long: 30.01 s; at most 30 s can be used; choose a part with --start and --end"
    )
    assert Recording.load(long, end_s=30).seconds == 30
    assert len(Recording.load(long, start_s=0.01).at(16_000)) == 480_000
    short = write_wav(speechlike(0.9, 16_000), 16_000, "short.wav")
    refused(short, "too short: 0.90 s; at least 1 s is needed", min_seconds=1.0)
    refused(short, "too short: 0.05 s; at least 0.1 s is needed", end_s=0.05)
    assert Recording.load(short, end_s=0.1).seconds == pytest.approx(0.1)


def test_silence(write_wav: WriteWav) -> None:
    refused(
        write_wav(np.zeros(24_000, np.float32), 24_000),
        r"silent: the level is -inf dBFS \(rms\); at least -60 dBFS is needed",
    )
    signal = speechlike(1, 24_000)
    level = Recording.load(write_wav(signal, 24_000)).rms_dbfs
    assert level == pytest.approx(20 * np.log10(0.07), abs=1e-3)
    Recording.load(write_wav(signal * 10 ** ((MIN_RMS_DBFS - level + 0.1) / 20), 24_000))
    refused(
        write_wav(signal * 10 ** ((MIN_RMS_DBFS - level - 0.2) / 20), 24_000),
        r"silent: the level is -60\.2 dBFS .+",
    )


SPEECH = speechlike(1, 24_000)


def with_values(*values: float) -> Any:
    """Returns a channel that begins with values."""
    return np.concatenate([np.array(values, np.float32), SPEECH[len(values) :]])


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ([SPEECH[:0]], "empty, it holds no samples"),
        ([SPEECH, -SPEECH], r"silent: the level is -inf dBFS \(rms, channels mixed\); .+"),
        ([SPEECH, SPEECH, with_values(*[1.0] * 48)], r"clipped: 0\.20% .+"),
        ([SPEECH, with_values(np.nan)], "holds samples that are NaN or infinite"),
        ([with_values(np.inf), with_values(-np.inf)], "holds samples that are NaN or infinite"),
        (
            [with_values(1e30)],
            r"the loudest sample is at 600\.0 dBFS; at most 6 dBFS can be used; .+",
        ),
        ([SPEECH * 32_768], "clipped: .+"),  # integers in a file of floats
    ],
)
def test_samples_that_are_refused(
    channels: list[Any], message: str, write_wav: WriteWav, recwarn: pytest.WarningsRecorder
) -> None:
    refused(write_wav(np.stack(channels, axis=1), 24_000), message)
    assert not recwarn


def test_samples_a_little_beyond_full_scale(write_wav: WriteWav) -> None:
    Recording.load(write_wav(with_values(1.9), 24_000))


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_clipping(subtype: str, write_wav: WriteWav) -> None:
    """Speech has amplitudes in about a Laplace distribution.

    A recording may reach full scale; 9 dB more is refused.
    """
    speech = np.random.default_rng(0).laplace(size=240_000)
    normalised = speech / np.abs(speech).max()
    Recording.load(write_wav(normalised, 24_000, subtype=subtype))
    refused(
        write_wav(np.clip(normalised * 10 ** (9 / 20), -1, 1), 24_000, subtype=subtype),
        r"clipped: \d\.\d\d% of the samples are at full scale; at most 0\.1% is allowed, .+",
    )
