"""Bodies of requests: mistakes in texts and in lists of codes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from token2wav_gateway.doors.realtime_events import ItemCreate, SessionUpdate, parse_event
from token2wav_gateway.doors.requests import SpeechRequest, problem
from token2wav_gateway.doors.stage_request import StageRequest
from token2wav_gateway.voices.voice_folder import Voice


@pytest.mark.parametrize(
    "codes", [[5, "x"], ["x"], [None], [True], [1.0], [[1], 2], [[1], ["x"]], 7]
)
@pytest.mark.parametrize("form", ["codes", "stage_output.codes.audio"])
def test_one_mistake_is_reported_for_any_number_of_wrong_codes(codes: Any, form: str) -> None:
    if isinstance(codes, list):
        codes = codes * 1000
    body = {"codes": codes} if form == "codes" else {"stage_output": {"codes": {"audio": codes}}}
    with pytest.raises(ValidationError) as caught:
        StageRequest.model_validate(body)
    assert caught.value.error_count() == 1
    field, message = problem(list(caught.value.errors()))
    assert field == form
    assert message.endswith("must be a list of integers, or a list of lists of integers")


def test_few_mistakes_are_reported_for_any_number_of_unknown_fields() -> None:
    body = {"input": "Hello.", "model": "tts-1", "voice": "joe"}
    flood = {f"field{index}": 1 for index in range(10_000)}
    with pytest.raises(ValidationError) as caught:
        SpeechRequest.model_validate(body | flood)
    assert caught.value.errors()[0]["loc"] == ("field0",)
    assert caught.value.error_count() == 1


def test_few_mistakes_are_reported_for_any_number_of_wrong_parts() -> None:
    flood = {f"field{index}": 1 for index in range(100)}
    item = {"type": "message", "role": "user", "content": [flood] * 64}
    with pytest.raises(ValidationError) as caught:
        ItemCreate.model_validate({"type": "conversation.item.create", "item": item})
    assert caught.value.error_count() == 3  # type and text are missing too


@pytest.mark.parametrize(
    ("language", "name", "code"),
    [
        (None, "Auto", "en"),
        ("Auto", "Auto", "en"),
        ("english", "English", "en"),
        ("de", "German", "de"),
        ("pt-BR", "Portuguese", "pt"),
        ("nl", "nl", "nl"),
    ],
)
def test_the_name_of_a_language(language: str | None, name: str, code: str) -> None:
    body = SpeechRequest.model_validate({"input": "It rains.", "language": language})
    assert (body.text("", Voice("")).language, body.language_code) == (name, code)


def test_sampling_outside_extra_params_goes_first() -> None:
    sampling = {"top_p": 0.5, "extra_params": {"top_p": 0.9, "temperature": 0.7}, "seed": 3}
    body = SpeechRequest.model_validate({"input": "It rains.", **sampling})
    assert body.sampling == {"top_p": 0.5, "temperature": 0.7, "seed": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speaker_embedding": [0.5]}, "speaker_embedding: is not a known field"),
        ({"ref_audio_2": "data:"}, "ref_audio_2: is not a known field"),
        ({"extra_params": {"emo_text": "glad"}}, "extra_params: 'emo_text' is not a known field"),
        ({"extra_params": {"a b": 1}}, "extra_params: 'a b' is not a known field"),
        ({"A-B": 1}, "A-B: is not a known field"),
        (
            {"pronunciations": {"a_word": ""}},
            "pronunciations: String should have at least 1 character",
        ),
        (
            {"pronunciations": {"w" * 900_000: "a"}},
            "pronunciations: String should have at most 100 characters",
        ),
        (
            {"pronunciations": {str(n): "" for n in range(50_000)}},
            "pronunciations: 50000 names; at most 100 are allowed",
        ),
        ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2"),
        ({"temperature": True}, "temperature: Input should be a valid number"),
        ({"extra_params": {"top_k": "5"}}, "extra_params.top_k: Input should be a valid integer"),
        ({"word_timestamps": "yes"}, "word_timestamps: Input should be a valid boolean"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SpeechRequest.model_validate({"input": "It rains.", **fields})
    assert problem(list(caught.value.errors()))[1].startswith(message)


def test_codes_are_needed() -> None:
    with pytest.raises(ValidationError, match="a code is needed"):
        StageRequest.model_validate({"codes": []})


@pytest.mark.parametrize("codes", [[5, 6], [[5], [6]], [[5, 6], [7, 8]]])
def test_codes_are_tokens_or_frames(codes: list[Any]) -> None:
    assert StageRequest.model_validate({"codes": codes}).codes == codes


def test_null_is_absent_in_events_of_realtime() -> None:
    output = {"format": {"type": "audio/pcm", "rate": None}, "voice": "joe", "speed": None}
    session = {"type": "realtime", "audio": {"input": None, "output": output}, "tone": None}
    event = parse_event({"type": "session.update", "event_id": None, "session": session})
    assert isinstance(event, SessionUpdate)
    assert event.session.output.voice_name == "joe"
