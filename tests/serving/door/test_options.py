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
from testkit.replies import RecordingReply
from testkit.utterances import joined, portions
from token2wav import (
    AudioChunk,
    InputError,
    StreamConfig,
    Token2Wav,
    UtteranceOptions,
    Voice,
)
from token2wav.config.values import shown
from token2wav.serving.door.message import Message, Parameters
from token2wav.serving.door.sequences import Owner
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


def test_an_id_is_free_with_the_final_chunk_of_a_stream_that_a_limit_ends(
    door: Door, voice: Voice
) -> None:
    class Hasty(RecordingReply):
        def send(self, chunk: AudioChunk) -> None:
            super().send(chunk)
            if chunk.final:
                again.append(door.send(TOKENS[:4], voice, "loops", start=True, end=True))

    again, parameters = list[RecordingReply](), {"end_after_repeats": REPEATS}
    spoken = door.send(LOOP, voice, "loops", start=True, parameters=parameters, reply=Hasty())
    assert len(audio_of([spoken])) == 960 * (40 + REPEATS - 1)
    assert len(audio_of(again)) == 960 * 4


# Refused parameters of a message.


def message(
    *, start: bool = True, parameters: Parameters | None = None, **voice_inputs: object
) -> Message:
    tokens = np.zeros(0, np.int32)
    return Message(7, start, False, Owner(), parameters or {}, tokens, voice_inputs)  # type: ignore[arg-type]


COUNTS = "is not 0 or an integer from 2 to 1000000"
SILENCE = "is not a number from 0 to 3600"
SPEED = "is not a number from 0.5 to 2"
FORMATS = "is not one of float32, int16, mulaw, alaw"
RATES = "is not one of 8000, 16000, 22050, 24000, 44100, 48000"
DELAYS = "is not a text of integers such as '0,1,2'"
# name of a parameter, its refused values, and the end of the message about each
REFUSED: list[tuple[str, list[Any], str]] = [
    ("speed", [2.5, "1", True, float("nan")], SPEED),
    ("keep_open", [1], "is not a boolean"),
    ("steps", [0], "is not an integer of at least 1"),
    ("decoder_noise", [0], "is not a boolean"),
    ("delays", [3, "0,-1", "0,1,"], DELAYS),
    ("end_after_repeats", [1, -1, 1_000_001, 2.0, "8", True], COUNTS),
    ("end_after_silence_s", [-0.1, 3601, float("nan"), float("inf"), "3", True], SILENCE),
    ("voice", [""], "is not a valid voice name"),
    ("audio_format", ["mp3", ["int16"]], FORMATS),
    ("sample_rate", [11_025, 8000.0, True], RATES),
]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [(name, value, words) for name, values, words in REFUSED for value in values],
)
def test_bad_options_are_raised_once_the_stream_is_found(name: str, value: Any, words: str) -> None:
    sent = message(start=False, parameters={name: value})
    with pytest.raises(InputError) as refused:
        sent.options()
    assert str(refused.value) == f"{name}: {shown(value)} {words}"


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(InputError, match=r"^parameters: 'pitch' is not a request parameter"):
        message(parameters={"pitch": 2}).options()


def test_only_the_first_request_may_carry_a_voice() -> None:
    voice_id = np.zeros(32, np.uint8)
    message(voice_id=voice_id).options()
    with pytest.raises(InputError, match=r"^voice_id: only the first request"):
        message(start=False, voice_id=voice_id).options()
