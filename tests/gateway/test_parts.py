"""Parts of the gateway: sentences, formats of audio and access keys."""

from __future__ import annotations

import hashlib
import io
import wave

import av
import numpy as np
import pytest
import soundfile

from token2wav_gateway.access import Access
from token2wav_gateway.encoding import FORMATS, RATE_HZ, Encoder, whole_file
from token2wav_gateway.errors import AccessDeniedError, BusyError
from token2wav_gateway.sentences import SentenceSplitter
from token2wav_gateway.settings import KeySettings

TEXT = 'It rains. "Take 3.5 coats!" she said… 你好。再见！\nNo end'
SENTENCES = ["It rains.", '"Take 3.5 coats!"', "she said…", "你好。", "再见！", "No end"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_sentences_do_not_depend_on_the_pieces(size: int) -> None:
    splitter, found = SentenceSplitter(1000), []
    for at in range(0, len(TEXT), size):
        found += splitter.feed(TEXT[at : at + size])
    found += splitter.close()
    assert found == SENTENCES
    assert splitter.close() == []


def test_a_sentence_without_words_is_dropped() -> None:
    splitter = SentenceSplitter(1000)
    assert splitter.feed("---\n... \N{THUMBS UP SIGN}\n3. ") == ["3."]
    assert splitter.feed("”") + splitter.close() == []


def test_a_sentence_without_an_end_is_cut() -> None:
    splitter = SentenceSplitter(20)
    found = splitter.feed("word " * 50) + splitter.close()
    assert all(len(sentence) <= 20 for sentence in found)
    assert " ".join(found).split() == ["word"] * 50
    assert max(map(len, SentenceSplitter(20).feed("x" * 100))) == 20


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
        found = np.concatenate(
            [frame.to_ndarray().ravel().astype(np.float64) for frame in container.decode(stream)]
        )
        rate = stream.rate
    if name in ("wav", "flac"):  # lossless
        assert np.array_equal(found, audio)
        assert rate == RATE_HZ
    else:  # padded to whole frames
        assert len(found) / rate >= len(audio) / RATE_HZ
        assert len(found) / rate < len(audio) / RATE_HZ + 0.15


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
    found = np.concatenate(frames).astype(np.float64)
    if name in ("wav", "flac"):  # lossless
        assert np.array_equal(found, audio)
    else:
        assert found[:, 0].std() == pytest.approx(2 * found[:, 1].std(), rel=0.05)


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


def key(name: str, **limits: int) -> KeySettings:
    return KeySettings(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **limits)


def test_only_known_keys_are_admitted() -> None:
    access = Access([key("one"), key("two")])
    for authorization in ("Bearer one", "bearer two"):
        with access.admitted(authorization):
            pass
    for wrong in (None, "", "one", "Basic one", "Bearer", "Bearer ONE", "Bearer one two"):
        with pytest.raises(AccessDeniedError, match="a valid key is needed"):
            access.check(wrong)
    Access([]).check(None)


def test_a_key_has_limits_of_its_own() -> None:
    now = 0.0
    access = Access([key("one", streams=1, requests_per_minute=2), key("two")], lambda: now)
    with access.admitted("Bearer one"):
        with (
            pytest.raises(BusyError, match="1 requests are running"),
            access.admitted("Bearer one"),
        ):
            pass
        with access.admitted("Bearer two"):
            pass
    with access.admitted("Bearer one"):
        pass
    now = 59.0
    with pytest.raises(BusyError, match="2 requests a minute"), access.admitted("Bearer one"):
        pass
    now = 60.0
    with access.admitted("Bearer one"):
        pass
