"""Output of an utterance: the same samples however they are portioned, equal to a conversion of the
whole.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit.models.tiny_model import TINY
from testkit.utterances import joined
from token2wav import AudioChunk, InputError
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.audio_output import ENCODERS, SAMPLE_RATES, AudioFormat, AudioOutput


@dataclass(frozen=True, kw_only=True)
class StereoConfig(CosyVoice3Config):
    channels: int = 2


CONFIG, STEREO = CosyVoice3Config.read(TINY), StereoConfig.read(TINY)
TOKEN = CONFIG.samples_per_token
WINDOW = 240  # 10 ms
EQUALS_WHOLE_DB = -80.0


def noise(samples: int, seed: int = 0, level: float = 0.2) -> NDArray[np.float32]:
    return (level * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def taken(output: AudioOutput, audio: NDArray[np.float32], cuts: list[int]) -> list[AudioChunk]:
    """Returns the chunks that are sent for audio in portions.

    It also checks the rules that hold for every utterance.
    """
    portions = np.split(audio, sorted(cuts))
    outputs = [
        output.take(portion, last=index == len(portions) - 1)
        for index, portion in enumerate(portions)
    ]
    chunks = [chunk for chunk in outputs if chunk is not None]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk.audio) for chunk in chunks[:-1])
    last, sent = chunks[-1], 0
    for chunk in chunks:  # every sample belongs to a token
        positions = sent + chunk.samples_trimmed + np.arange(len(chunk.audio))
        tokens = np.unique(positions // chunk.samples_per_token).tolist()
        assert list(range(chunk.first_token, chunk.first_token + chunk.token_count)) == tokens
        sent += len(chunk.audio)
    assert sum(len(chunk.audio) for chunk in chunks) + last.samples_trimmed == (
        last.samples_per_token * (len(audio) / TOKEN)
    )
    return chunks


@st.composite
def portioned(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draws the number of tokens of an utterance, and the cuts of its audio."""
    tokens = draw(st.integers(1, 60))
    return tokens, draw(st.lists(st.integers(0, tokens * TOKEN), max_size=12))


@pytest.mark.parametrize("sample_rate", SAMPLE_RATES)
@settings(max_examples=15)
@given(portioned())
def test_resampled_in_portions_equals_the_whole(
    sample_rate: int, case: tuple[int, list[int]]
) -> None:
    tokens, cuts = case
    audio = noise(tokens * TOKEN)
    chunks = taken(AudioOutput(CONFIG, AudioFormat("float32", sample_rate)), audio, cuts)
    whole = (
        soxr.resample(audio, CONFIG.sample_rate, sample_rate)
        if sample_rate != CONFIG.sample_rate
        else audio
    )
    output = joined(chunks)
    assert output.dtype == np.float32
    assert len(output) == len(whole)
    assert 20 * np.log10(np.std(output - whole) / np.std(whole) + 1e-20) < EQUALS_WHOLE_DB
    assert {chunk.sample_rate for chunk in chunks} == {sample_rate}


@pytest.mark.parametrize(
    ("sample_rate", "most_s"), [(8_000, 0.075), (16_000, 0.04), (48_000, 0.04)]
)
def test_a_resampler_holds_back_no_more_than_is_said(sample_rate: int, most_s: float) -> None:
    output, given_s, sent_s = AudioOutput(CONFIG, AudioFormat("int16", sample_rate)), 0.0, 0.0
    for size in np.random.default_rng(1).integers(1, 2000, 50):
        chunk = output.take(noise(int(size)), last=False)
        given_s += int(size) / CONFIG.sample_rate
        sent_s += chunk.duration_s if chunk else 0.0
        assert given_s - sent_s <= most_s


@pytest.mark.parametrize(
    ("encoding", "subtype"), [("mulaw", "ULAW"), ("alaw", "ALAW"), ("int16", "PCM_16")]
)
def test_encodings_equal_libsndfile(encoding: str, subtype: str) -> None:
    pcm = np.arange(-32767, 32768).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, pcm, 8000, format="RAW", subtype=subtype, endian="LITTLE")
    encoded = ENCODERS[encoding]((pcm / 32767).astype(np.float32))
    assert encoded.tobytes() == file.getvalue()


def test_loud_samples_are_clipped() -> None:
    loud = np.array([1.5, -1.5], np.float32)
    assert [encode(loud).tolist() for encode in ENCODERS.values()] == [
        [1.5, -1.5],
        [32767, -32767],
        [128, 0],
        [170, 42],
    ]


@pytest.mark.parametrize(
    ("encoding", "sample_rate"), [("float32", None), ("mulaw", 8_000), ("int16", 22_050)]
)
@settings(max_examples=15)
@given(portioned(), st.integers(0, 8000), st.integers(0, 300))
def test_trimmed_in_portions_equals_the_whole(
    encoding: str, sample_rate: int | None, case: tuple[int, list[int]], silence: int, trim_ms: int
) -> None:
    tokens, cuts = case
    audio = noise(tokens * TOKEN)
    audio[:silence] *= 1e-3
    # else a window may end in noise near 0
    audio[silence:] += np.copysign(np.float32(0.1), audio[silence:])
    windows = min(trim_ms // 10, min(silence, len(audio)) // WINDOW)
    rate = sample_rate or CONFIG.sample_rate
    chunks = taken(AudioOutput(CONFIG, AudioFormat(encoding, sample_rate), trim_ms), audio, cuts)
    assert chunks[-1].samples_trimmed == -(-windows * WINDOW * rate // CONFIG.sample_rate)
    rest = audio[windows * WINDOW :]
    whole = ENCODERS[encoding](
        soxr.resample(rest, CONFIG.sample_rate, rate) if sample_rate else rest
    )
    output = joined(chunks)
    # where the part that was dropped is no whole number of samples
    assert len(whole) - len(output) in (0, 1)
    assert np.array_equal(output, whole[: len(output)])


def test_nothing_but_silence_is_sent_as_an_end() -> None:
    [only] = taken(
        AudioOutput(CONFIG, trim_silence_ms=5000), np.zeros(10 * TOKEN, np.float32), [100, 5000]
    )
    assert (only.final, len(only.audio), only.samples_trimmed, only.sound_s) == (
        True,
        0,
        10 * TOKEN,
        None,
    )


@pytest.mark.parametrize(
    ("trim_ms", "sample_rate", "sound_s"), [(0, None, 0.5), (200, None, 0.3), (1000, 8000, 0.0)]
)
def test_the_first_sound_is_found(trim_ms: int, sample_rate: int | None, sound_s: float) -> None:
    audio = noise(50 * TOKEN)
    audio[:12_000] *= 0.003  # -64 dBFS
    chunks = taken(
        AudioOutput(CONFIG, AudioFormat("alaw", sample_rate), trim_ms),
        audio,
        [7000, 11_000, 20_000],
    )
    before = np.cumsum([0.0, *(chunk.duration_s for chunk in chunks)])
    [first_sound_s] = [
        start + chunk.sound_s
        for start, chunk in zip(before, chunks, strict=False)
        if chunk.sound_s is not None
    ]
    assert first_sound_s == pytest.approx(sound_s, abs=0.011)


def test_a_rate_that_a_model_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        sample_rate, samples_per_token, channels, missing_samples = 22_050, 512, 1, 0

    with pytest.raises(
        InputError, match=r"^sample_rate: 8000 gives 185\.76 samples per token of this model"
    ):
        AudioOutput(Odd(), AudioFormat(sample_rate=8000))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "soxr", None)
    AudioOutput(CONFIG, AudioFormat(sample_rate=24_000))
    with pytest.raises(
        InputError,
        match=r"^sample_rate: 8000 needs the library soxr, which is not installed on this server",
    ):
        AudioOutput(CONFIG, AudioFormat(sample_rate=8000))


@pytest.mark.parametrize("sample_rate", [None, 16_000])
@pytest.mark.parametrize("cuts", [[], [1, 700, 701, 5000]], ids=["whole", "portions"])
def test_two_channels_are_two_outputs_of_one_channel(
    cuts: list[int], sample_rate: int | None
) -> None:
    """Samples of two channels are in turn. The silence of both channels together is trimmed."""
    audio_format = AudioFormat("float32", sample_rate)
    left, right = noise(10 * TOKEN, 1), noise(10 * TOKEN, 2)
    left[: 5 * WINDOW] = right[: 3 * WINDOW] = 0
    outputs = [AudioOutput(config, audio_format, 60) for config in (STEREO, CONFIG)]
    both = np.stack((left, right), axis=1)
    portions = np.split(both, cuts)
    chunks = [
        outputs[0].take(portion.ravel(), last=index == len(portions) - 1)
        for index, portion in enumerate(portions)
    ]
    sent = [chunk for chunk in chunks if chunk is not None]
    expected = taken(outputs[1], right, cuts)
    assert expected[-1].samples_trimmed > 0
    assert len(sent) == len(expected)
    for chunk, other in zip(sent, expected, strict=True):
        assert chunk.audio.shape == (len(other.audio), 2)
        assert chunk.duration_s == other.duration_s
        assert vars(chunk) | {"audio": None} == vars(other) | {"audio": None}
    assert np.array_equal(joined(sent)[:, 1], joined(expected))
    # The left channel is not trimmed more than the right one.
    alone = taken(AudioOutput(CONFIG, audio_format), left, [])
    trimmed = sent[-1].samples_trimmed
    difference = np.abs(joined(sent)[:, 0] - joined(alone)[trimmed:]).max()
    assert difference <= (1e-3 if sample_rate else 0)  # a resampler also sees the silence before


@pytest.mark.parametrize("encoding", ["mulaw", "alaw"])
def test_telephony_has_one_channel(encoding: str) -> None:
    with pytest.raises(
        InputError, match=f"^audio_format: {encoding} has one channel, but this model has 2; expec"
    ):
        AudioOutput(STEREO, AudioFormat(encoding))


@pytest.mark.parametrize("rate", [24_000, 16_000, 8_000, 48_000])
@pytest.mark.parametrize("trim_ms", [0.0, 100.0])
def test_missing_samples_of_a_decoder_count_as_trimmed(rate: int, trim_ms: float) -> None:
    class Shorter(type(CONFIG)):  # type: ignore[misc]
        missing_samples = 555

    config, missing = Shorter(**vars(CONFIG)), Shorter.missing_samples
    audio = np.concatenate((np.zeros(500, np.float32), noise(9 * TOKEN - 500 - missing)))
    output = AudioOutput(config, AudioFormat(sample_rate=rate), trim_ms)
    outputs = [output.take(part, last=False) for part in np.split(audio, [200, 3000])]
    chunks = [*(chunk for chunk in outputs if chunk), output.take(audio[:0], last=True)]
    assert chunks[-1] is not None
    sent = sum(len(chunk.audio) for chunk in chunks if chunk)
    dropped = missing + (2 * WINDOW if trim_ms else 0)
    assert chunks[-1].samples_trimmed == -(-dropped * rate // 24_000)
    assert sent + chunks[-1].samples_trimmed == 9 * chunks[-1].samples_per_token
    assert chunks[0] is not None
    assert chunks[0].first_token == dropped // TOKEN
    empty = AudioOutput(config).take(audio[:0], last=True)
    assert empty is not None
    assert empty.samples_trimmed == 0
