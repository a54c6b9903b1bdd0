"""Options of an utterance through the door of a server: audio, refusals, and the end by a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soxr

from testkit.batches import WHOLE_BLOCKS
from testkit.door import Door, audio_of
from testkit.models.golden import snr_db
from testkit.models.tiny_model import TINY, demo_tokens
from testkit.utterances import joined, portions
from token2wav import StreamConfig, Token2Wav, UtteranceOptions, Voice
from token2wav_client.audio import decoded

STEPS = (4, 2)
TOKENS = demo_tokens(80)
REPEATS = 8
LOOP = np.concatenate((TOKENS[:40], np.full(200, TOKENS[39])))
ENDED = (
    f"stream: {REPEATS} equal tokens in a row (end_after_repeats) ended it, so it accepts no more "
    "tokens"
)
G711_DB, SAME_DB = 30, 60  # 8 bits of a sample; sums in another order


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    stream = StreamConfig(first_tokens=WHOLE_BLOCKS.first_tokens, steps=STEPS)
    with Door.open(Token2Wav.load(TINY, stream=stream)) as door:
        yield door


def whole(door: Door, voice: Voice, **options: Any) -> np.ndarray[Any, Any]:
    return door.model.synthesize(TOKENS, voice, UtteranceOptions(**options))


@pytest.mark.parametrize("options", [{"steps": 2}, {"speed": 0.8}, {"speed": 1.3, "steps": 2}])
def test_steps_and_speeds(door: Door, voice: Voice, options: dict[str, Any]) -> None:
    chunks = door.heard(portions(TOKENS, [3, 30]), voice, **options)
    audio = joined(chunks)
    assert audio.shape == (int(2 * len(TOKENS) / options.get("speed", 1)) * 480,)
    assert snr_db(audio, whole(door, voice, **options)) > SAME_DB
    ends = [chunk.first_token + chunk.token_count for chunk in chunks]
    assert ends[-1] == len(TOKENS)
    assert all(chunk.first_token >= end - 1 for chunk, end in zip(chunks[1:], ends, strict=False))
    usual = whole(door, voice, speed=options.get("speed", 1.0))
    assert ("steps" in options) == (snr_db(audio, usual) < SAME_DB)


@pytest.mark.parametrize(
    ("audio_format", "sample_rate"),
    [("mulaw", 8000), ("alaw", 16_000), ("int16", 22_050), ("float32", 48_000)],
)
def test_formats_and_rates(door: Door, voice: Voice, audio_format: Any, sample_rate: int) -> None:
    asked = {"audio_format": audio_format, "sample_rate": sample_rate}
    chunks = door.heard(portions(TOKENS, [3, 30]), voice, **asked)
    assert {chunk.sample_rate for chunk in chunks} == {sample_rate}
    assert chunks[-1].first_token + chunks[-1].token_count == len(TOKENS)
    audio = np.concatenate([decoded(chunk.audio, audio_format) for chunk in chunks])
    expected = soxr.resample(whole(door, voice), 24_000, sample_rate)
    if audio_format != "float32":
        audio, expected = audio / np.float32(32767), np.clip(expected, -1, 1)
    assert snr_db(audio, expected) > (G711_DB if "law" in audio_format else SAME_DB)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_steps_of_no_solver_are_refused(door: Door, voice: Voice, steps: int) -> None:
    refusal = door.refusal(TOKENS, voice, parameters={"steps": steps})
    assert refusal == f"steps: {steps} is not one of 4, 2"


@pytest.mark.parametrize("keep_open", [True, False])
def test_requests_after_the_end_by_a_limit(door: Door, voice: Voice, keep_open: bool) -> None:
    """Later requests get one clear sentence, and the id is free for another stream."""
    parameters = {"end_after_repeats": REPEATS, "keep_open": keep_open}
    spoken = door.send(LOOP, voice, "loops", start=True, parameters=parameters)
    assert len(audio_of([spoken])) == 960 * (40 + REPEATS - 1)
    for end in (False, True):
        assert door.refusal([1], None, "loops", end=end) == ENDED
    again = door.send(LOOP[:30], voice, "loops", start=True, end=True)
    assert len(audio_of([again])) == 960 * 30
