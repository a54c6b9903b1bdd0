"""Features against the same from first principles; rates against sines, which are known at every
rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.voices import reference
from tests.voices.material import Signal, WriteWav, speechlike
from token2wav_voice import Recording
from token2wav_voice.features import prompt_mel, speaker_features, tokenizer_features

Features = Callable[[NDArray[np.float32]], NDArray[np.floating]]
# features, the reference, sampling rate, and tolerance: some filters are of float32
FEATURES: dict[str, tuple[Features, Features, int, float]] = {
    "tokenizer": (tokenizer_features, reference.whisper_log_mel, 16_000, 5e-5),
    "prompt": (prompt_mel, reference.prompt_mel, 24_000, 2e-5),
    "prompt to 8 kHz": (
        partial(prompt_mel, top_hz=8_000),
        partial(reference.prompt_mel, top_hz=8_000),
        24_000,
        2e-5,
    ),
    "speaker": (speaker_features, reference.kaldi_fbank, 16_000, 5e-4),
}


@pytest.mark.parametrize("samples", [16_000, 16_001, 2_400, 12_345])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, samples: int) -> None:
    """Near the end of the signal all features are at their floors."""
    features, expected, rate, tolerance = FEATURES[name]
    signal = speechlike(samples / rate, rate)
    signal[samples // 2 :] *= 1e-4
    signal[3 * samples // 4 :] = 0
    heard = features(signal)
    assert heard.dtype == np.float32
    np.testing.assert_allclose(heard, expected(signal), atol=tolerance)


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
