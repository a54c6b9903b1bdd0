"""Options and voice of a message."""

from __future__ import annotations

import numpy as np
import pytest

from token2wav import InputError
from token2wav.serving.door.message import Message, Parameters
from token2wav.serving.door.sequences import Owner


def message(
    *, start: bool = True, parameters: Parameters | None = None, **voice_inputs: object
) -> Message:
    tokens = np.zeros(0, np.int32)
    return Message(7, start, False, Owner(), parameters or {}, tokens, voice_inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"pitch": 2}, "^parameters: 'pitch' is not a request parameter"),
        ({"speed": 2.5}, "^speed: 2.5 is not a number from 0.5 to 2$"),
        ({"speed": "1"}, "^speed: '1' is not a number from 0.5 to 2$"),
        ({"speed": True}, "^speed: True is not a number from 0.5 to 2$"),
        ({"speed": float("nan")}, "^speed: nan is not a number from 0.5 to 2$"),
        ({"keep_open": 1}, "^keep_open: 1 is not a boolean"),
        ({"steps": 0}, "^steps: 0 is not an integer of at least 1"),
        ({"decoder_noise": 0}, "^decoder_noise: 0 is not a boolean"),
        ({"delays": 3}, "^delays: 3 is not a text of integers such as '0,1,2'"),
        ({"delays": "0,-1"}, "^delays: '0,-1' is not a text of integers"),
        ({"delays": "0,1,"}, "^delays: '0,1,' is not a text of integers"),
        ({"end_after_repeats": 1}, "^end_after_repeats: 1 is not 0 or an integer from 2"),
        ({"end_after_silence_s": "3"}, "^end_after_silence_s: '3' is not a number from 0"),
        ({"voice": ""}, "^voice: '' is not a valid voice name"),
    ],
)
@pytest.mark.parametrize("start", [True, False])
def test_bad_options_are_raised_once_the_stream_is_found(
    start: bool, parameters: Parameters, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        message(start=start, parameters=parameters).options()


def test_only_the_first_request_may_carry_a_voice() -> None:
    voice_id = np.zeros(32, np.uint8)
    message(voice_id=voice_id).options()
    with pytest.raises(InputError, match=r"^voice_id: only the first request"):
        message(start=False, voice_id=voice_id).options()
