"""Formats of audio: every format decodes to the audio that it was made from."""

from __future__ import annotations

import hashlib
import io
import wave
from collections.abc import Sequence

import av
import numpy as np
import pytest
import soundfile

from token2wav_client.audio import DTYPES, AudioFormat, decoded
from token2wav_gateway.encoding import FORMATS, RATE_HZ, Encoder

# Formats without a header: samples, and a bound of half a step of G.711 at an amplitude of 8000.
BARE: dict[str, tuple[AudioFormat, int]] = {
    "pcm": ("int16", 0),
    "pcmu": ("mulaw", 160),
    "pcma": ("alaw", 160),
}


def tone(seconds: float) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    time = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    return np.rint(8000 * np.sin(2 * np.pi * 440 * time)).astype(np.int16)


def encoded(
    audio: np.ndarray[tuple[int, ...], np.dtype[np.int16]],
    name: str,
    sizes: Sequence[int] = (),
    **options: bool,
) -> bytes:
    """Encodes audio in parts of these sizes, and a last part with the rest."""
    encoder = Encoder(name, **options)
    parts = np.split(audio, np.cumsum(sizes))
    return b"".join(encoder.encode(part) for part in parts) + encoder.finish()


def read(content: bytes) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], int]:
    """Decodes a file into samples (n, channels), and returns its rate."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        frames = [
            frame.to_ndarray().reshape(-1, stream.channels)
            if frame.format.is_packed
            else frame.to_ndarray().T
            for frame in container.decode(stream)
        ]
        return np.concatenate(frames).astype(np.float64), stream.rate


def assert_bare(
    content: bytes, name: str, audio: np.ndarray[tuple[int, ...], np.dtype[np.int16]]
) -> None:
    """Asserts that samples without a header are those of the audio, up to a step of G.711."""
    kind, step = BARE[name]
    samples = decoded(np.frombuffer(content, DTYPES[kind]), kind)
    assert samples.shape == audio.shape
    assert np.abs(samples - audio.astype(int)).max() <= step


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", [[], [960, 0, 1, 4800], [7]])
def test_a_format_decodes_to_the_same_audio(name: str, sizes: list[int], whole: bool) -> None:
    audio = tone(7 / RATE_HZ if sizes == [7] else 1.0)
    content = encoded(audio, name, sizes, whole=whole)
    if name in BARE:
        assert_bare(content, name, audio)
        return
    samples, rate = read(content)
    samples = samples[:, 0]
    if name in ("wav", "flac"):  # lossless
        assert np.array_equal(samples, audio)
        assert rate == RATE_HZ
    elif name == "mp3" and whole and sizes != [7]:  # its header has delay and padding
        assert len(samples) == len(audio)
    else:  # padded to whole frames
        assert len(samples) / rate >= len(audio) / RATE_HZ
        assert len(samples) / rate < len(audio) / RATE_HZ + 0.15


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mono", [False, True])
def test_two_channels(name: str, mono: bool) -> None:
    """Samples without a container do not say how many channels they have, so they are mixed."""
    audio = np.stack((tone(1.0), tone(1.0) // 2), axis=1)
    mean = np.rint(audio.mean(axis=1)).astype(np.int16)
    content = encoded(audio, name, [0, 500], mono=mono)
    if name in BARE:
        assert_bare(content, name, mean)
        return
    samples, rate = read(content)
    assert samples.shape[1] == (1 if mono else 2)
    assert rate == (48_000 if name == "opus" else RATE_HZ)
    if name in ("wav", "flac"):  # lossless
        assert np.array_equal(samples, mean[:, None] if mono else audio)
    elif not mono:
        assert samples[:, 0].std() == pytest.approx(2 * samples[:, 1].std(), rel=0.05)


def test_a_piece_of_audio_is_sent_at_once() -> None:
    """A format may hold back one frame of its own, and no more."""
    for name in FORMATS:
        encoder, sent = Encoder(name), 0
        encoder.encode(tone(0.4))
        sent = sum(len(encoder.encode(tone(0.1))) > 0 for _ in range(10))
        assert sent >= 9, name


@pytest.mark.parametrize("whole", [False, True])
def test_the_samples_of_a_wav_file_begin_after_44_bytes(whole: bool) -> None:
    """Many clients cut the header off without reading it."""
    content = encoded(tone(0.5), "wav", whole=whole)
    assert content[44:] == tone(0.5).tobytes()
    audio, rate = soundfile.read(io.BytesIO(content), dtype="int16")
    assert rate == RATE_HZ
    assert np.array_equal(audio, tone(0.5))


def test_a_whole_file_has_its_length_in_its_header() -> None:
    with wave.open(io.BytesIO(encoded(tone(0.5), "wav", [960], whole=True))) as file:
        assert file.readframes(file.getnframes()) == tone(0.5).tobytes()
    flac = encoded(tone(0.5), "flac", [960], whole=True)
    assert np.array_equal(soundfile.read(io.BytesIO(flac), dtype="int16")[0], tone(0.5))
    assert flac[26:42] == hashlib.md5(tone(0.5).tobytes()).digest()
    mp3 = soundfile.read(io.BytesIO(encoded(tone(0.5), "mp3", [960], whole=True)))[0]
    assert np.abs(32768 * mp3 - tone(0.5)).max() < 800  # 10 % of the amplitude, without a delay
