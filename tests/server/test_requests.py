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

START = 1


def test_all_values_of_a_first_request() -> None:
    voice = demo_voice(4)
    parameters = {
        "audio_format": "int16",
        "sample_rate": 16000,
        "keep_open": True,
        "steps": 4,
        "decoder_noise": False,
        "delays": "0,1,12",
        "end_after_repeats": 5,
        "end_after_silence_s": 2,
        "speed": 1.5,
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
        4, False, (0, 1, 12), AudioFormat("int16", 16000), 5, 2, 1.5
    )


@pytest.mark.parametrize(
    "parameters",
    [{CLIENT_HEADER: 5}, {CLIENT_HEADER: "a" * 129}, {"stream_key": ""}, {"stream_key": "k" * 129}],
)
def test_an_owner_that_cannot_be_read_refuses_the_request(parameters: object) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(parameters))}: not a"):  # type: ignore[call-overload]
        message_of(7, START, json.dumps(parameters), {})
