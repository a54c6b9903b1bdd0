"""Parsing of Triton requests, with stand-ins for Triton's objects of a Python backend."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from testkit.models.tiny_model import demo_tokens, demo_voice
from tests.server.test_service import FakeRequest, FakeTriton, tensors_of
from token2wav import InputError
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.options import UtteranceOptions
from token2wav_server.sequences import CLIENT_HEADER, Owner

START, END = 1, 2


class Message(FakeRequest):
    """Request with an id, flags and parameters."""

    def __init__(
        self, sequence_id: int | str = 7, flags: int = 0, parameters: object = None, **inputs: Any
    ) -> None:
        super().__init__(**inputs)
        self._id, self._flags, self._parameters = sequence_id, flags, parameters

    def correlation_id(self) -> Any:
        return self._id

    def flags(self) -> int:
        return self._flags

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class `TritonRequest`."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeTriton())
    yield importlib.import_module("token2wav_server.triton_request").TritonRequest
    sys.modules.pop("token2wav_server.triton_request", None)


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
    parser: Any, sequence_id: int | str, flags: int, start: bool, end: bool
) -> None:
    read = parser.read(Message(sequence_id, flags))
    assert (read.sequence_id, read.start, read.end) == (sequence_id, start, end)


def test_all_values_of_a_first_request(parser: Any) -> None:
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
    read = parser.read(Message(7, START, parameters, tokens=demo_tokens(3), **tensors_of(voice)))
    assert read.owner == Owner("alice", "secret")
    assert np.array_equal(read.tokens, demo_tokens(3))
    assert set(read.voice_inputs) == {"prompt_tokens", "prompt_mel", "speaker_embedding"}
    options = read.options()
    assert (options.keep_open, options.voice) == (True, "anna")
    assert options.utterance == UtteranceOptions(
        4, False, (0, 1, 12), AudioFormat("int16", 16000), speed=2
    )


def test_a_request_may_have_neither_tokens_nor_parameters(parser: Any) -> None:
    read = parser.read(Message())
    assert (read.tokens.shape, read.owner, read.voice_inputs) == ((0,), Owner(), {})
    assert read.options().utterance == UtteranceOptions()


@pytest.mark.parametrize(
    "parameters",
    [{CLIENT_HEADER: 5}, {CLIENT_HEADER: "a" * 129}, {"stream_key": ""}, {"stream_key": "k" * 129}],
)
def test_an_owner_that_cannot_be_read_refuses_the_request(parser: Any, parameters: object) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(parameters))}: not a"):  # type: ignore[call-overload]
        parser.read(Message(7, START, parameters))


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
@pytest.mark.parametrize("flags", [0, START])
def test_bad_options_are_raised_once_the_stream_is_found(
    parser: Any, flags: int, parameters: object, words: str
) -> None:
    read = parser.read(Message(7, flags, parameters))
    with pytest.raises(InputError, match=words):
        read.options()


def test_only_the_first_request_may_carry_a_voice(parser: Any) -> None:
    voice_id = np.zeros(32, np.uint8)
    parser.read(Message(7, START, voice_id=voice_id)).options()
    read = parser.read(Message(7, 0, voice_id=voice_id))
    with pytest.raises(InputError, match=r"^voice_id: only the first request"):
        read.options()
