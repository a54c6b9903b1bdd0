"""Requests of Triton, read into messages."""

from __future__ import annotations

import json

import numpy as np
import pytest

from testkit.models.tiny_model import demo_tokens, demo_voice
from token2wav import InputError
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.door.sequences import CLIENT_HEADER, Owner
from token2wav.serving.options import UtteranceOptions
from token2wav_server.requests import message_of

START, END = 1, 2


@pytest.mark.parametrize(
    ("sequence_id", "flags", "start", "end"),
    [
        (7, START, True, False),
        (7, 0, False, False),
        ("seven", END, False, True),
        (7, START | END, True, True),
        (0, 0, True, True),  # a request without an id is a whole utterance
        ("", 0, True, True),
    ],
)
def test_position_in_the_utterance(
    sequence_id: int | str, flags: int, start: bool, end: bool
) -> None:
    message = message_of(sequence_id, flags, "", {})
    assert (message.sequence_id, message.start, message.end) == (sequence_id, start, end)


def test_all_values_of_a_first_request() -> None:
    voice = demo_voice(4)
    parameters = {
        "audio_format": "int16",
        "sample_rate": 16000,
        "keep_open": True,
        "steps": 4,
        "decoder_noise": False,
        "delays": "0,1,12",
        "speed": 2,
        "voice": "anna",
        "stream_key": "secret",
        CLIENT_HEADER: "alice",
        "triton_enable_empty_final_response": True,
        "sequence_id": 7,
    }
    message = message_of(
        7, START, json.dumps(parameters), {"tokens": demo_tokens(3), **vars(voice)}
    )
    assert message.owner == Owner("alice", "secret")
    assert np.array_equal(message.tokens, demo_tokens(3))
    assert set(message.voice_inputs) == {"prompt_tokens", "prompt_mel", "speaker_embedding"}
    options = message.options()
    assert (options.keep_open, options.voice) == (True, "anna")
    assert options.utterance == UtteranceOptions(
        4, False, (0, 1, 12), AudioFormat("int16", 16000), speed=2
    )


def test_a_request_may_have_neither_tokens_nor_parameters() -> None:
    message = message_of(7, 0, "", {})
    assert (message.tokens.shape, message.owner, message.voice_inputs) == ((0,), Owner(), {})
    assert message.options().utterance == UtteranceOptions()


@pytest.mark.parametrize(
    "parameters",
    [{CLIENT_HEADER: 5}, {CLIENT_HEADER: "a" * 129}, {"stream_key": ""}, {"stream_key": "k" * 129}],
)
def test_an_owner_that_cannot_be_read_refuses_the_request(parameters: object) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(parameters))}: not a"):  # type: ignore[call-overload]
        message_of(7, START, json.dumps(parameters), {})
