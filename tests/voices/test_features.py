"""Features against the same from first principles; rates against sines, which are known at every
rate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.voices import reference
from tests.voices.material import Signal, WriteWav, speechlike
from token2wav_voice import Recording
from token2wav_voice.features import prompt_mel, speaker_features, tokenizer_features


@pytest.mark.parametrize("samples", [16_000, 16_001, 1_600, 12_345])
def test_tokenizer_features(samples: int) -> None:
    signal = speechlike(samples / 16_000, 16_000)
    features = tokenizer_features(signal)
    assert features.dtype == np.float32
    assert features.shape == (128, samples // 160)
    # filters of float32
    np.testing.assert_allclose(features, reference.whisper_log_mel(signal), atol=5e-5)


@pytest.mark.parametrize("top_hz", [12_000, 8_000])
@pytest.mark.parametrize("samples", [24_000, 24_001, 2_400, 12_345])
def test_prompt_mel(samples: int, top_hz: int) -> None:
    signal = speechlike(samples / 24_000, 24_000)
    mel = prompt_mel(signal, top_hz)
    assert mel.dtype == np.float32
    assert mel.shape == (samples // 480, 80)
    np.testing.assert_allclose(mel, reference.prompt_mel(signal, top_hz), atol=2e-5)


@pytest.mark.parametrize("samples", [16_000, 16_001, 1_600, 12_345])
def test_speaker_features(samples: int) -> None:
    signal = speechlike(samples / 16_000, 16_000)
    features = speaker_features(signal)
    assert features.dtype == np.float32
    assert features.shape == (1 + (samples - 400) // 160, 80)
    # computed in float32
    np.testing.assert_allclose(features, reference.kaldi_fbank(signal), atol=5e-4)
    np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-5)


def test_speaker_features_at_their_floor() -> None:
    """Only at the floor the scale of the samples shows: elsewhere the mean removes it."""
    signal = speechlike(1, 16_000)
    signal[8_000:] *= 1e-4
    features = speaker_features(signal)
    np.testing.assert_allclose(features, reference.kaldi_fbank(signal), atol=5e-4)
    assert len(np.unique(features[60:90, 40])) == 1


def test_floors() -> None:
    """Digital silence in a recording gives the floors of the definitions, not minus infinity."""
    signal = np.concatenate([speechlike(0.5, 24_000), np.zeros(12_000, np.float32)])
    assert prompt_mel(signal)[-3:].min() > np.log(1e-5) - 1e-4
    heard = tokenizer_features(signal)
    assert heard.max() - heard.min() == pytest.approx(2)  # 8 decades, divided by 4
    assert np.isfinite(speaker_features(signal)).all()


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 44_056])
@pytest.mark.parametrize("new_rate", [16_000, 24_000])
def test_resampling_keeps_frequencies_that_both_rates_can_hold(
    rate: int, new_rate: int, write_wav: WriteWav
) -> None:
    path = write_wav(sine(997, rate), rate)
    audio = Recording.load(path).at(new_rate)
    expected = sine(997, new_rate)
    assert audio.dtype == np.float32
    assert abs(len(audio) - len(expected)) <= 1
    inner = slice(new_rate // 20, len(expected) - new_rate // 20)
    np.testing.assert_allclose(audio[inner], expected[inner], atol=2e-5)


@pytest.mark.parametrize("rate", [22_050, 44_100, 48_000])
def test_resampling_removes_frequencies_above_the_new_rate(rate: int, write_wav: WriteWav) -> None:
    path = write_wav(sine(9_000, rate), rate)
    assert np.abs(Recording.load(path).at(16_000)[800:-800]).max() < 1e-4


def test_channels_are_mixed(write_wav: WriteWav) -> None:
    left, right = speechlike(1, 24_000, seed=1), speechlike(1, 24_000, seed=2)
    recording = Recording.load(write_wav(np.stack([left, right], axis=1), 24_000))
    np.testing.assert_allclose(recording.samples, (left + right) / 2, atol=1e-7)
    assert recording.channels == 2
    assert [note.partition(": ")[2] for note in recording.notes] == ["2 channels were mixed to one"]


def test_a_part(write_wav: WriteWav) -> None:
    signal = speechlike(3, 44_100)
    path: Path = write_wav(signal, 44_100)
    np.testing.assert_array_equal(
        Recording.load(path, start_s=0.5, end_s=2).samples, signal[22_050:88_200]
    )
    np.testing.assert_array_equal(Recording.load(path, start_s=2).samples, signal[88_200:])
    np.testing.assert_array_equal(Recording.load(path, end_s=3).samples, signal)


@pytest.mark.parametrize(
    ("name", "subtype", "error"),
    [("r.flac", "PCM_24", 1e-6), ("r.wav", "PCM_16", 1e-4), ("r.ogg", "VORBIS", 0.05)],
)
def test_formats(name: str, subtype: str, error: float, write_wav: WriteWav) -> None:
    signal = speechlike(1, 24_000)
    audio = Recording.load(write_wav(signal, 24_000, name, subtype)).samples
    assert len(audio) == len(signal)
    assert np.abs(audio - signal).max() < error


def sine(hz: float, rate: int) -> Signal:
    """Returns one second of a sine."""
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(rate) / rate)).astype(np.float32)
