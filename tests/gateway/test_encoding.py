"""Formats of audio: every format decodes to the audio that it was made from."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import pytest
import soundfile

from token2wav_gateway.encoding import FORMATS, RATE_HZ, Encoder, whole_file


def tone(seconds: float) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    time = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    return np.rint(8000 * np.sin(2 * np.pi * 440 * time)).astype(np.int16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", [[24_000], [960, 0, 1, 4800, 18_239], [7]])
def test_a_format_decodes_to_the_same_audio(name: str, sizes: list[int]) -> None:
    audio, encoder, content = tone(1.0)[: sum(sizes)], Encoder(name), b""
    for part in np.split(audio, np.cumsum(sizes)[:-1]):
        content += encoder.encode(part)
    content += encoder.finish()
    if name == "pcm":
        assert np.array_equal(np.frombuffer(content, "<i2"), audio)
        return
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        samples = np.concatenate(
            [frame.to_ndarray().ravel().astype(np.float64) for frame in container.decode(stream)]
        )
        rate = stream.rate
    if name in ("wav", "flac"):  # lossless
        assert np.array_equal(samples, audio)
        assert rate == RATE_HZ
    else:  # padded to whole frames
        assert len(samples) / rate >= len(audio) / RATE_HZ
        assert len(samples) / rate < len(audio) / RATE_HZ + 0.15


@pytest.mark.parametrize("name", FORMATS)
def test_two_channels(name: str) -> None:
    audio, encoder = np.stack((tone(1.0), tone(1.0) // 2), axis=1), Encoder(name)
    parts = np.split(audio, [0, 500])
    content = b"".join(encoder.encode(part) for part in parts) + encoder.finish()
    if name == "pcm":
        assert content == audio.tobytes()
        return
    with av.open(io.BytesIO(whole_file(name, content))) as container:
        stream = container.streams.audio[0]
        assert (stream.channels, stream.rate) == (2, 48_000 if name == "opus" else RATE_HZ)
        frames = [
            frame.to_ndarray().reshape(-1, 2) if frame.format.is_packed else frame.to_ndarray().T
            for frame in container.decode(stream)
        ]
    samples = np.concatenate(frames).astype(np.float64)
    if name in ("wav", "flac"):  # lossless
        assert np.array_equal(samples, audio)
    else:
        assert samples[:, 0].std() == pytest.approx(2 * samples[:, 1].std(), rel=0.05)


def test_a_piece_of_audio_is_sent_at_once() -> None:
    """A format may hold back one frame of its own, and no more."""
    for name in FORMATS:
        encoder, sent = Encoder(name), 0
        encoder.encode(tone(0.4))
        sent = sum(len(encoder.encode(tone(0.1))) > 0 for _ in range(10))
        assert sent >= 9, name


def test_wav_is_readable_by_soundfile() -> None:
    encoder = Encoder("wav")
    content = encoder.encode(tone(0.5)) + encoder.finish()
    audio, rate = soundfile.read(io.BytesIO(content), dtype="int16")
    assert rate == RATE_HZ
    assert np.array_equal(audio, tone(0.5))


def test_a_whole_wav_file_has_its_length() -> None:
    encoder = Encoder("wav")
    content = whole_file("wav", encoder.encode(tone(0.5)) + encoder.finish())
    with wave.open(io.BytesIO(content)) as file:
        assert file.getnframes() == len(tone(0.5))
        assert file.readframes(file.getnframes()) == tone(0.5).tobytes()
    assert int.from_bytes(content[4:8], "little") == len(content) - 8
    assert whole_file("pcm", b"ab") == b"ab"
