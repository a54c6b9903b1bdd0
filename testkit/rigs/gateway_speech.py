"""Speech of a gateway under test: its requests, the audio that is expected, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from testkit.rigs.gateway_rig import VOICE, tokens_of
from token2wav import Token2Wav, UtteranceOptions, Voice
from token2wav_client import ClientVoice

TEXT = "one two three four five six seven eight"
# tokens per second of the language model; a text of 200 words lasts for 5 s, so that a client on a
# busy machine can leave before its end
PACE = 250.0


def expected(
    model: Token2Wav, voice: ClientVoice, text: str, speed: float = 1.0
) -> NDArray[np.int16]:
    library_voice = Voice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
    tokens, options = np.array(tokens_of(text), np.int32), UtteranceOptions(speed=speed)
    audio = model.synthesize(tokens, library_voice, options)
    return np.rint(np.clip(audio, -1, 1) * 32767).astype(np.int16)


def assert_same(content: bytes, reference: NDArray[np.int16]) -> None:
    """Asserts equality up to one step of 16 bits, because hops sum in another order."""
    audio = np.frombuffer(content, np.int16)
    assert audio.shape == reference.shape
    assert np.abs(audio.astype(int) - reference).max() <= 1


def body(**fields: Any) -> dict[str, Any]:
    usual = {"model": "token2wav", "voice": VOICE, "input": TEXT, "response_format": "pcm"}
    return {name: value for name, value in (usual | fields).items() if value is not None}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream. The line before its data names the type of each event."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            event = json.loads(value)
            assert event["type"] == name
            yield event
