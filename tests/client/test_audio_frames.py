"""Telephony frames have equal lengths for any lengths of chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_client import AudioChunk, InputError, frames
from token2wav_client.audio import AudioArray, AudioFormat


def chunks(
    audio: AudioArray, cuts: list[int], audio_format: AudioFormat = "mulaw"
) -> list[AudioChunk]:
    parts, times = np.split(audio, sorted(cuts)), (0.0, 0.0, None)
    ends = [False] * (len(parts) - 1) + [True]
    return [
        AudioChunk(part, index, final, *times, 8000, 320, audio_format=audio_format)
        for index, (part, final) in enumerate(zip(parts, ends, strict=True))
    ]


@given(
    st.integers(0, 900),
    st.lists(st.integers(0, 900), max_size=6),
    st.sampled_from([(2.5, 20), (20, 160), (30, 240)]),
)
def test_frames_hold_all_samples_and_end_in_silence(
    count: int, cuts: list[int], length: tuple[float, int]
) -> None:
    audio = np.random.default_rng(count).integers(0, 255, count).astype(np.uint8)
    blocks = list(frames(chunks(audio, cuts), length[0]))
    assert all(frame.shape == (length[1],) and frame.dtype == np.uint8 for frame in blocks)
    joined = np.concatenate([np.zeros(0, np.uint8), *blocks])
    assert joined[:count].tolist() == audio.tolist()
    assert joined[count:].tolist() == [0xFF] * (-count % length[1])


@pytest.mark.parametrize(("audio_format", "silence"), [("alaw", 0xD5), ("int16", 0)])
def test_silence_is_that_of_the_format(audio_format: AudioFormat, silence: int) -> None:
    [frame] = frames(chunks(np.ones(159, np.uint8), [], audio_format))
    assert frame[-1] == silence


def test_frames_of_two_channels() -> None:
    audio = np.arange(2 * 200, dtype=np.int16).reshape(200, 2)
    first, second = frames(chunks(audio, [30], "int16"))
    assert np.array_equal(first, audio[:160])
    assert np.array_equal(second, np.pad(audio[160:], ((0, 120), (0, 0))))


@pytest.mark.parametrize("milliseconds", [0, -20, 0.1, 20.01])
def test_a_frame_is_a_whole_number_of_samples(milliseconds: float) -> None:
    with pytest.raises(InputError, match="is not a whole number of samples at 8000 Hz"):
        list(frames(chunks(np.ones(9, np.uint8), []), milliseconds))
