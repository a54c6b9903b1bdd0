"""Gateway in front of a server: OpenAI's interfaces, equal to the library's audio."""

from __future__ import annotations

import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import (
    TOKENS_OF_A_WORD,
    VOICE,
    GatewayRig,
    key_settings,
    tokens_of,
)
from testkit.rigs.gateway_speech import (
    TEXT,
    assert_same,
    body,
    error_of,
    events_of,
    expected,
)
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav_client import ClientVoice

SETTINGS = {
    "limits": {"text_characters": 1000, "speech_tokens": 1300, "idle_s": 300},
    "text": {"pronunciations": {"SQL": "sequel", "Ada": "Eda"}},
}
PACE = 250.0  # tokens per second


def test_a_whole_file_has_its_usage_in_its_headers(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    names = ("texts_total", "audio_ttfp_s_count", "audio_rtf_count", "audio_underrun_s_count")

    def counts() -> list[float]:
        labels = {"texts_total": {"outcome": "done"}}
        return [gateway.value(name, **labels.get(name, {})) for name in names]

    before = counts()
    text, tokens = TEXT * 4, len(tokens_of(TEXT * 4))
    with gateway.http() as http:
        whole = http.post(
            "/v1/audio/speech",
            json=body(input=text, stream=False, response_format="wav", speed=0.75),
        )
        events = http.post("/v1/audio/speech", json=body(stream=True))
        codes = http.post("/v1/stage/run", json={"codes": tokens_of(TEXT), "voice": VOICE})
    assert events.headers["content-type"].startswith("text/event-stream")
    assert int(whole.headers["content-length"]) == len(whole.content)
    with wave.open(io.BytesIO(whole.content)) as wav:
        assert_same(wav.readframes(wav.getnframes()), expected(model, voice, text, 0.75))
    usage = {"input": len(text), "output": tokens, "total": len(text) + tokens}
    for name, count in usage.items():
        assert whole.headers[f"x-vllm-omni-{name}-tokens"] == str(count)
    assert codes.headers["x-vllm-omni-output-tokens"] == str(len(tokens_of(TEXT)))
    done, ttfp, rtf, underrun = (now - then for now, then in zip(counts(), before, strict=True))
    assert done == ttfp == rtf == 3
    assert underrun >= 1  # the long text has several chunks


def test_events_carry_the_tokens_and_the_usage(gateway: GatewayRig) -> None:
    with gateway.http() as http:
        answer = http.post("/v1/audio/speech", json=body(stream_format="sse"))
    events = list(events_of(answer.text.splitlines()))
    assert all(event["audio"] and "timestamps" not in event for event in events[:-1])
    tokens = TOKENS_OF_A_WORD * len(TEXT.split())
    sent = [(event["samples"], event["tokens"]) for event in events[:-1]]
    assert len(sent) > 1
    assert all(covered == -(-samples // 960) for samples, covered in sent)
    assert sent[-1][1] == tokens
    assert events[-1] == {
        "type": "speech.audio.done",
        "usage": {
            "input_tokens": len(TEXT),
            "output_tokens": tokens,
            "total_tokens": len(TEXT) + tokens,
        },
    }


def test_a_client_may_keep_the_spelling_of_a_word(
    gateway: GatewayRig, speaker: LanguageModel
) -> None:
    text = "SQL rains. Ada, too."
    fields = body(input=text, stream_format="sse", pronunciations={"Ada": "Ada"})
    with gateway.http() as http:
        answer = http.post("/v1/audio/speech", json=fields)
    *_, done = events_of(answer.text.splitlines())
    assert speaker.bodies[-1]["messages"][0]["content"] == "sequel rains. Ada, too."
    assert done["usage"]["input_tokens"] == len(text)


@pytest.mark.parametrize(
    ("fields", "status", "param", "reason"),
    [
        (
            {"response_format": "m4a"},
            400,
            "response_format",
            "not one of pcm, wav, flac, opus, mp3, aac",
        ),
        ({"speed": 2.1}, 400, "speed", "must be from 0.5 to 2"),
        ({"stream_format": "ws"}, 400, "stream_format", "'audio' or 'sse'"),
        ({"input": None}, 400, "input", "Field required"),
        ({"input": " \n"}, 400, "input", "empty"),
        ({"input": "x" * 1001}, 400, "input", "1001 characters; at most 1000"),
        ({"input": "half \ud83d"}, 400, "input", "valid Unicode"),
        ({"voice": "half \ud83d"}, 400, "voice", "valid Unicode"),
        ({"instructions": "half \ude00"}, 400, "instructions", "valid Unicode"),
        ({"instructions": "x" * 1001}, 400, "instructions", "1001 characters; at most 1000"),
        ({"voice": "nobody"}, 404, "voice", "'nobody' is not one of: anna"),
        ({"voice": "../anna"}, 404, "voice", "'../anna' is not one of"),
        ({"voice": {"id": 1}}, 400, "voice", "valid string"),
        ({"model": "gpt-5"}, 404, "model", "'gpt-5' is not one of: token2wav, tts-1"),
        ({"emotion": "joy"}, 400, "emotion", "^emotion: is not a known field$"),
        ({"A-B": 1}, 400, "A-B", "^A-B: is not a known field$"),
        ({f"a{n}": 0 for n in range(10_000)}, 400, "a0", "^a0: is not a known field$"),
        ({"extra_params": {"emo": "glad"}}, 400, "extra_params", "'emo' is not a known field"),
        ({"extra_params": {"a b": 1}}, 400, "extra_params", "'a b' is not a known field"),
        ({"extra_params": {"top_k": "5"}}, 400, "extra_params.top_k", "valid integer"),
        ({"temperature": 2.5}, 400, "temperature", "less than or equal to 2"),
        ({"temperature": True}, 400, "temperature", "valid number"),
        ({"pronunciations": {"a_word": ""}}, 400, "pronunciations", "at least 1 character"),
        ({"pronunciations": {"w" * 900_000: "a"}}, 400, "pronunciations", "at most 100 char"),
        (
            {"pronunciations": {str(n): "" for n in range(50_000)}},
            400,
            "pronunciations",
            "50000 names; at most 100 are allowed",
        ),
        (
            {"pronunciations": {f"{n:0100}": "a" for n in range(11)}},
            400,
            "pronunciations",
            "words of 1100 characters in all; at most 1000 are allowed",
        ),
        ({"input": "SQL " * 20, "pronunciations": {"SQL": "x" * 99}}, 400, "input", "at most 1000"),
        ({"word_timestamps": "yes"}, 400, "word_timestamps", "valid boolean"),
        ({"word_timestamps": True}, 400, "word_timestamps", "needs stream_format sse"),
        ({"sample_rate": 11_025}, 400, "sample_rate", "11025 is not one of 8000, .*, 48000$"),
        (
            {"response_format": "pcmu", "sample_rate": 16_000},
            400,
            "sample_rate",
            "16000 is not one of 8000$",
        ),
        ({"seed": 1.5}, 400, "seed", "valid integer"),
        ({"max_new_tokens": 0}, 400, "max_new_tokens", "greater than or equal to 1"),
        ({"language": "Klingon"}, 400, "language", "neither an ISO code"),
        ({"voice": None}, 400, "voice", "missing; the gateway has no setting `voices.default`"),
        ({"voice": "default"}, 404, "voice", "'default' is not one of"),
        ({"voice": "alloy"}, 404, "voice", "'alloy' is not one of"),
        ({"ref_text": "hello"}, 400, "ref_text", "needs the recording of its words in ref_audio"),
        ({"ref_audio": "https://a.example/b.wav"}, 400, "ref_audio", "fetches no recordings"),
        ({"ref_audio": "file:///etc/passwd"}, 400, "ref_audio", "must be a data URL in base64"),
        ({"ref_audio": "data:audio/wav;base64,@"}, 400, "ref_audio", "is no valid base64"),
        ({"ref_audio": "data:audio/wav;base64,QUJD"}, 400, "ref_audio", "creates no voices"),
        ({"input": "nothing"}, 502, None, "status 400: .*0 words"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(
    gateway: GatewayRig, fields: dict[str, Any], status: int, param: str | None, reason: str
) -> None:
    content = json.dumps(body(**fields))
    with gateway.http(headers={"content-type": "application/json"}) as http:
        error = error_of(http.post("/v1/audio/speech", content=content), status)
    assert error["param"] == param
    assert re.search(reason, error["message"]), error


def test_an_unknown_path_and_a_body_that_is_no_json_are_refused(gateway: GatewayRig) -> None:
    with gateway.http() as http:
        assert "Not Found" in error_of(http.get("/v1/audio"), 404)["message"]
        assert "Method Not Allowed" in error_of(http.get("/v1/audio/speech"), 405)["message"]
        wrong = http.post(
            "/v1/audio/speech", content=b"{", headers={"content-type": "application/json"}
        )
        assert error_of(wrong, 400)["message"].startswith("body: ")
        assert error_of(http.post("/v1/audio/speech", json=[]), 400)["message"] == (
            "body: must be a JSON object"
        )


@pytest.mark.parametrize("kind", [None, "text/json", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/stage/run"])
def test_a_body_without_the_header_of_its_type_names_the_header(
    gateway: GatewayRig, path: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    with gateway.http() as http:
        answer = http.post(path, content=json.dumps(body()), headers=headers)
    assert error_of(answer, 400)["message"] == (
        "body: must be a JSON object, with the header Content-Type: application/json"
    )


def test_models_and_health(gateway: GatewayRig) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        names = [model.id for model in client.models.list()]
        assert names[:2] == ["token2wav", "tts-1"]
        assert client.models.retrieve("tts-1").id == "tts-1"
    with gateway.http() as http:
        assert http.get("/health/live").json() == {"status": "live"}
        assert http.get("/health/ready").json() == {"status": "ready"}
        assert "/v1/audio/speech" in http.get("/openapi.json").json()["paths"]


def test_a_gateway_without_servers_says_which_one_is_missing(
    rig: DoorServer, voice: ClientVoice, tmp_path: Path
) -> None:
    settings = {
        "language_model": {"connect_timeout_s": 5},
        "speech_server": {"response_timeout_s": PATIENCE_SECONDS},
    }
    with (
        GatewayRig.start(
            tmp_path,
            grpc_url=rig.server.grpc_url,
            language_model_url="http://127.0.0.1:9",
            voice=voice,
            settings={**settings, "keys": [key_settings("shop", "one")]},
        ) as gateway,
        gateway.http() as http,
    ):
        assert http.get("/health/live").status_code == 200
        unnamed = error_of(http.get("/health/ready"), 502)["message"]
        assert unnamed == "gateway: a server behind it does not work"
        http.headers["authorization"] = "Bearer one"
        assert "language model: " in error_of(http.get("/health/ready"), 502)["message"]
        assert (
            "language model: "
            in error_of(http.post("/v1/audio/speech", json=body()), 502)["message"]
        )
