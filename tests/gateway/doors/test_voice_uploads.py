"""Voices that clients of a gateway make of recordings, and recordings that it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from examples import demo
from examples.demo_voice.recordings import PROMPT
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import PROMPT_TEXT, GatewayRig, tokens_of
from testkit.rigs.gateway_speech import TEXT, body, error_of
from token2wav_gateway.voices.listener import Listener

SETTINGS = {
    "voices": {"model": demo.MODEL, "most": 2, "longest_s": 10},
    "limits": {"text_characters": 1000},
}


def test_a_recording_becomes_a_voice(gateway: GatewayRig) -> None:
    recording = PROMPT.read_bytes()
    fields = {"name": "bob", "ref_text": PROMPT_TEXT}
    with gateway.http() as http:
        made = http.post("/v1/audio/voices", data=fields, files={"audio_sample": recording})
        assert made.status_code == 201, made.text
        assert made.json()["text"] == PROMPT_TEXT
        assert http.get("/v1/audio/voices").json()["voices"] == ["anna", "bob"]
        spoken = http.post("/v1/audio/speech", json=body(voice={"id": "bob"}))
        assert len(spoken.content) == 2 * 960 * len(tokens_of(TEXT))
        again = http.post("/v1/audio/voices", data=fields, files={"audio_sample": recording})
        assert "a voice 'bob' exists" in error_of(again, 400)["message"]
        more = http.post(
            "/v1/audio/voices", data=fields | {"name": "eve"}, files={"audio_sample": recording}
        )
        assert "2 exist" in error_of(more, 429)["message"]
        assert http.delete("/v1/audio/voices/bob").json()["deleted"]
        error_of(http.delete("/v1/audio/voices/bob"), 404)
    assert sorted(path.name for path in gateway.voices.iterdir()) == ["anna.safetensors"]


@pytest.mark.parametrize(
    ("fields", "recording", "reason"),
    [
        ({"name": "../bob"}, b"", "must have 1 to 64 letters"),
        ({"name": ".bob"}, b"", "must have 1 to 64 letters"),
        ({"name": "b" * 65}, b"", "must have 1 to 64 letters"),
        ({"name": "bob"}, b"", "audio_sample: empty; a recording is needed"),
        ({"name": "bob"}, b"RIFF" + bytes(1000), "audio_sample: the recording: cannot be read"),
        ({"name": "bob"}, b"<html>" * 1000, "audio_sample: the recording: cannot be read"),
        ({}, b"x", "name: Field required"),
    ],
)
def test_an_upload_that_is_no_voice_is_refused(
    gateway: GatewayRig, fields: dict[str, str], recording: bytes, reason: str
) -> None:
    with gateway.http() as http:
        answer = http.post("/v1/audio/voices", data=fields, files={"audio_sample": recording})
    assert reason in error_of(answer, 400)["message"]
    assert [path.name for path in gateway.voices.iterdir()] == ["anna.safetensors"]


def test_many_recordings_for_one_name_make_one_voice(
    gateway: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, refused, voice_of = PROMPT.read_bytes(), threading.Event(), Listener.voice_of

    def after_a_refusal(listener: Listener, *arguments: Any) -> Any:
        assert refused.wait(PATIENCE_SECONDS)
        return voice_of(listener, *arguments)

    def upload(_: int) -> int:
        with gateway.http() as http:
            files = {"audio_sample": recording}
            answer = http.post("/v1/audio/voices", data={"name": "bob"}, files=files)
        if answer.status_code == 429:
            refused.set()
        return answer.status_code

    monkeypatch.setattr(Listener, "voice_of", after_a_refusal)
    with ThreadPoolExecutor(20) as pool:
        statuses = sorted(pool.map(upload, range(20)))
    assert statuses[0] == 201
    assert set(statuses[1:]) == {400, 429}  # the name is taken, or too many recordings wait
    with gateway.http() as http:
        http.delete("/v1/audio/voices/bob")


def test_words_of_a_voice_in_a_strange_encoding_are_refused(gateway: GatewayRig) -> None:
    """Python can decode a form into text that no list of voices could contain."""
    recording = PROMPT.read_bytes()
    parts = {"name": b"bob", "ref_text": b"half \\ud83d", "audio_sample": recording}
    form = b"".join(
        b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        % (name.encode(), b'; filename="a"' if name == "audio_sample" else b"", content)
        for name, content in parts.items()
    )
    kind = "multipart/form-data; boundary=x; charset=unicode_escape"
    with gateway.http() as http:
        answer = http.post(
            "/v1/audio/voices", content=form + b"--x--\r\n", headers={"content-type": kind}
        )
    assert "ref_text: must be valid Unicode" in error_of(answer, 400)["message"]


def test_a_long_text_of_a_voice_is_refused(gateway: GatewayRig) -> None:
    fields = {"name": "bob", "ref_text": "x" * 1001}
    with gateway.http() as http:
        answer = http.post("/v1/audio/voices", data=fields, files={"audio_sample": b"x"})
    error = error_of(answer, 413)
    assert error["message"] == "ref_text: 1001 characters; at most 1000 are allowed"
    assert error["param"] == "ref_text"
