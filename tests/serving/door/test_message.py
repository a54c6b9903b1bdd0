"""Options and voice of a message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from token2wav import InputError, UtteranceOptions
from token2wav.config.values import shown
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.door.message import Message, Options, Parameters
from token2wav.serving.door.sequences import Owner


def message(
    *, start: bool = True, parameters: Parameters | None = None, **voice_inputs: object
) -> Message:
    tokens = np.zeros(0, np.int32)
    return Message(7, start, False, Owner(), parameters or {}, tokens, voice_inputs)  # type: ignore[arg-type]


REPEATS = "is not 0 or an integer from 2 to 1000000"
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
    ("end_after_repeats", [1, -1, 1_000_001, 2.0, "8", True], REPEATS),
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


def test_all_options_reach_the_utterance() -> None:
    parameters: Parameters = {"steps": 3, "decoder_noise": False, "delays": "0,2,1", "speed": 1.5}
    parameters |= {"audio_format": "alaw", "sample_rate": 8000, "keep_open": True, "voice": "anna"}
    options = message(parameters={**parameters, "end_after_repeats": 5, "end_after_silence_s": 2})
    expected = UtteranceOptions(3, False, (0, 2, 1), AudioFormat("alaw", 8000), 5, 2, 1.5)
    assert options.options() == Options(expected, True, "anna")


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(InputError, match=r"^parameters: 'pitch' is not a request parameter"):
        message(parameters={"pitch": 2}).options()


def test_only_the_first_request_may_carry_a_voice() -> None:
    voice_id = np.zeros(32, np.uint8)
    message(voice_id=voice_id).options()
    with pytest.raises(InputError, match=r"^voice_id: only the first request"):
        message(start=False, voice_id=voice_id).options()
