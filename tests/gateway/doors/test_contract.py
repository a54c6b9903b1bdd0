"""Contract of all doors of the gateway: the same text has the same audio, end, refusal and freed
resources over HTTP, the WebSocket, Realtime and Riva.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import numpy as np
import pytest
import soxr

from testkit.batches import WHOLE_BLOCKS
from testkit.models.tiny_model import ODE_STEPS, TINY
from testkit.patience import until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_lines import DOORS, Line
from testkit.rigs.gateway_rig import VOICE, GatewayRig, key_settings, tokens_of
from testkit.rigs.gateway_speech import assert_same, body, error_of, expected
from testkit.rigs.hostile_language_model import CUT_OFF
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav.config import LimitConfig, ServerConfig
from token2wav_client import Client, ClientVoice
from token2wav_client.audio import AudioFormat, decoded

TEXT = "One two three four five six seven eight."
SLOW = f"{'slow ' * 600}end."
HELD = 2000  # tokens of SLOW after which the language model waits, so that no cancel is too late
LISTENED_S, WORD_S = 2.0, 0.065 * len("slow ")
LOOP = "Loop."
MARKS = "Marks within speech."  # text whose tokens have numbers outside the vocabulary among them
LONG = "long " * 200
LENGTH = len(tokens_of(LONG))  # tokens
PACE = 5000.0  # tokens per second
AHEAD_S = 5.0
# Tokens of AHEAD_S, of a chunk of the speech server, and of the buffers on the way; 40 ms each.
MOST_TOKENS = (AHEAD_S + 25.0) / 0.04
REPEATS = 5
STREAMS, SERVER_STREAMS, SOCKETS, IDLE_S = 2, 3, 8, 5.0
KEY, TRACE = "a key", "0af7651916cd43dd8448eb211c80319c"
STREAMING = [name for name in DOORS if "whole" not in name]
SESSIONS = ["socket", "realtime"]
SETTINGS = {
    "voices": {"default": VOICE},
    "aligner": {"name": "Letters", "timeout_s": 60},
    "text": {"pronunciations": {"SQL": "sequel"}},
    "limits": {"streams": STREAMS, "sockets": SOCKETS, "idle_s": IDLE_S, "ahead_s": AHEAD_S},
    "keys": [
        key_settings("shop", KEY),
        *(key_settings(door, door, requests_per_minute=2) for door in DOORS),
    ],
}


def said(text: str) -> list[int]:
    if text == MARKS:
        tokens = tokens_of(text)
        return [6562, *tokens[:9], 6561, 99_999, *tokens[9:], 6562]
    return [7] * 1000 if text == LOOP else tokens_of(text)


@pytest.fixture(scope="module")
def speaker(made_up_aligners: object) -> LanguageModel:
    """Language model of a gateway that can import the aligners."""
    return LanguageModel(said, pace=PACE, holds_after=HELD)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    stream = replace(WHOLE_BLOCKS, steps=(ODE_STEPS,), end_after_repeats=REPEATS)
    config = ServerConfig(stream, limits=LimitConfig(streams=SERVER_STREAMS))
    with DoorServer.start(TINY, tmp_path_factory.mktemp("repository"), config) as rig:
        yield rig


def opened(gateway: GatewayRig, door: str, key: str = KEY, trace: str = "") -> Line:
    return DOORS[door](gateway, key, trace)


@pytest.mark.parametrize("door", DOORS)
def test_a_connection_says_the_audio_of_the_library(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice, door: str
) -> None:
    references = {text: expected(model, voice, text) for text in (TEXT, "One two.")}
    with opened(gateway, door) as line:
        for text, reference in references.items():
            assert_same(line.say(text), reference)


@pytest.mark.parametrize("door", DOORS)
def test_the_text_is_changed_before_it_is_spoken(
    gateway: GatewayRig, speaker: LanguageModel, door: str
) -> None:
    """A door that repeats the text repeats the changed one."""
    with DOORS[door](gateway, KEY, words=True) as line:
        assert line.say("SQL rains.")
    assert speaker.bodies[-1]["messages"][0]["content"] == "sequel rains."
    assert line.spoken == ("" if door in ("http", "whole file") else "sequel rains.")


@pytest.mark.parametrize("door", DOORS)
def test_the_language_model_gets_the_trace(
    gateway: GatewayRig, speaker: LanguageModel, door: str
) -> None:
    with opened(gateway, door, trace=f"00-{TRACE}-b7ad6b7169203331-01") as line:
        assert line.say("One.")
    # Where spans are recorded, the trace has the parent of the request.
    assert speaker.traces[-1].split("-")[1] == TRACE


@pytest.mark.parametrize("door", STREAMING)
def test_a_client_that_leaves_cancels_both_requests(
    gateway: GatewayRig, speaker: LanguageModel, rig: DoorServer, door: str
) -> None:
    before, ended = speaker.cancelled, rig.ended()["cancelled"]
    texts = gateway.value("texts_total", outcome="cancelled")
    with opened(gateway, door) as line:
        line.begin(SLOW)
        assert next(line.pieces())
    until(lambda: speaker.cancelled == before + 1)
    until(lambda: rig.ended()["cancelled"] == ended + 1)
    until(lambda: gateway.value("texts_total", outcome="cancelled") == texts + 1)


@pytest.mark.parametrize("door", STREAMING)
def test_a_slow_reader_holds_the_language_model_back(gateway: GatewayRig, door: str) -> None:
    before = gateway.value("speech_tokens_total")
    with opened(gateway, door) as line:
        line.begin(LONG)
        pieces = line.pieces()
        first = next(pieces)
        until(lambda: gateway.value("held_back") == 1)
        time.sleep(2)  # in which the whole answer would arrive; the gateway drops a client later
        assert gateway.value("speech_tokens_total") - before < MOST_TOKENS < LENGTH
        assert len(first + b"".join(pieces)) == 2 * 960 * LENGTH


@pytest.mark.parametrize("audio", [("pcm", 16_000), ("pcmu", 8000), ("pcma", 8000)])
@pytest.mark.parametrize("door", DOORS)
def test_audio_of_telephones(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice, door: str, audio: tuple[str, int]
) -> None:
    name, rate_hz = audio
    with DOORS[door](gateway, KEY, audio=audio) as line:
        content = np.frombuffer(line.say(TEXT), np.int16 if name == "pcm" else np.uint8)
    formats: dict[str, AudioFormat] = {"pcm": "int16", "pcmu": "mulaw", "pcma": "alaw"}
    samples = decoded(content, formats[name]).astype(float)
    reference = soxr.resample(expected(model, voice, TEXT).astype(float), 24_000, rate_hz)
    assert len(samples) == len(reference)
    # The server resamples before it clips, and G.711 keeps 12 bits of a sample.
    assert 10 * np.log10(np.mean(reference**2) / np.mean((samples - reference) ** 2)) > 20


@pytest.mark.parametrize("door", [name for name in DOORS if DOORS[name].has_words])
def test_the_times_of_the_words_follow_the_audio(gateway: GatewayRig, door: str) -> None:
    with DOORS[door](gateway, KEY, words=True) as line:
        milliseconds = len(line.say("ab cd")) / 48
        assert line.times == [  # of an aligner that gives each letter the same time
            (letter, round(milliseconds / 4 * at), round(milliseconds / 4 * (at + 1)))
            for at, letter in enumerate("abcd")
        ]


@pytest.mark.parametrize("door", [*SESSIONS, "riva"])
def test_cancel_stops_the_speech_and_the_connection_speaks_on(
    gateway: GatewayRig,
    speaker: LanguageModel,
    rig: DoorServer,
    model: Token2Wav,
    voice: ClientVoice,
    door: str,
) -> None:
    before, ended = speaker.cancelled, rig.ended()["cancelled"]
    reference = expected(model, voice, TEXT)
    with opened(gateway, door) as line:
        line.begin(SLOW)
        pieces = line.pieces()
        assert next(pieces)
        line.cancel()
        assert len(b"".join(pieces)) < 2 * 960 * len(tokens_of(SLOW)) / 2
        until(lambda: speaker.cancelled == before + 1)
        until(lambda: rig.ended()["cancelled"] == ended + 1)
        assert_same(line.say(TEXT), reference)


@pytest.mark.parametrize("door", SESSIONS)
def test_cancel_tells_what_the_listener_has_heard(gateway: GatewayRig, door: str) -> None:
    """By the clock of a player, at the pace that is assumed of a text of unknown length."""
    with opened(gateway, door) as line:
        line.begin(SLOW)
        began, pieces = time.monotonic(), line.pieces()
        assert next(pieces)
        time.sleep(LISTENED_S)
        line.cancel()
        assert b"".join(pieces) is not None
        longest_s = time.monotonic() - began
        assert SLOW.startswith(line.heard)
        words = len(line.heard.split())
        assert LISTENED_S / WORD_S - 1 < words < longest_s / WORD_S + 1


@pytest.mark.parametrize("door", SESSIONS)
def test_a_client_that_says_what_it_has_played_learns_the_text(
    gateway: GatewayRig, door: str
) -> None:
    with opened(gateway, door) as line:
        assert len(line.say("SQL two three four five.")) / 48 == 1200  # milliseconds
        line.report_played(800)  # of the text as it is spoken, 44 for each letter
        assert line.heard == "sequel two three"


def test_a_client_that_leaves_before_the_first_audio_cancels_its_text(
    gateway: GatewayRig, speaker: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speaker, "holds_after", 1)
    before, texts = speaker.cancelled, gateway.value("texts_total", outcome="cancelled")
    with gateway.http(headers={"authorization": f"Bearer {KEY}"}) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/audio/speech", json=body(), timeout=1.5)
        until(lambda: speaker.cancelled == before + 1)
        until(lambda: gateway.value("texts_total", outcome="cancelled") == texts + 1)


@pytest.mark.parametrize("door", DOORS)
def test_a_text_that_fails_leaves_the_connection_usable(gateway: GatewayRig, door: str) -> None:
    with opened(gateway, door) as line:
        assert not line.say("nothing")
        assert line.error.startswith("language model: status 400: ")
        assert "0 words" in line.error
        assert line.say("One.")
        assert not line.error


@pytest.mark.parametrize("key", ["", "wrong"])
@pytest.mark.parametrize("door", DOORS)
def test_a_wrong_key_is_refused(gateway: GatewayRig, door: str, key: str) -> None:
    with opened(gateway, door, key) as line:
        assert not line.say(TEXT)
        assert line.error == "authorization: a valid key is needed, as 'Bearer KEY'"


def test_only_health_and_documents_need_no_key(gateway: GatewayRig) -> None:
    with gateway.http() as http:
        for path in ("/v1/models", "/v1/models/tts-1", "/v1/audio/voices"):
            error_of(http.get(path), 401)
        for path in ("/v1/audio/speech", "/v1/audio/voices", "/v1/stage/run"):
            error_of(http.post(path, json={}), 401)
        error_of(http.delete(f"/v1/audio/voices/{VOICE}"), 401)
        for path in ("/health/live", "/health/ready", "/", "/docs", "/openapi.json"):
            assert http.get(path).status_code == httpx.codes.OK
        refused = http.get("/v1/models", headers={"authorization": "Bearer two"})
        assert refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("door", DOORS)
def test_requests_of_a_key_are_counted(gateway: GatewayRig, door: str) -> None:
    """Opening a session is a request too."""
    with opened(gateway, door, key=door) as line:
        errors = [line.error for _ in range(3) if not line.say("One.")]
    late = f"key {door}: 2 requests a minute are allowed"
    assert errors == [late] * (2 if door in SESSIONS else 1)


@pytest.mark.parametrize(("text", "reason"), [(CUT_OFF, "length"), (LOOP, "repeats"), (TEXT, "")])
@pytest.mark.parametrize("door", [name for name in DOORS if name != "http"])
def test_the_limit_that_ends_a_text_is_its_end_reason(
    gateway: GatewayRig, door: str, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    counted = gateway.value("cut_off_total", reason=reason)
    with opened(gateway, door) as line:
        audio = line.say(text)
    assert line.end_reason == reason
    assert len(audio) == 2 * 960 * (REPEATS if text == LOOP else len(tokens_of(text)))
    assert caplog.messages == [f"a text was cut off: end_reason {reason}"] * bool(reason)
    assert gateway.value("cut_off_total", reason=reason) == counted + bool(reason)


def test_a_later_sentence_keeps_the_end_reason_of_a_response(gateway: GatewayRig) -> None:
    with opened(gateway, "realtime") as line:
        audio = line.say(f"{LOOP} {TEXT}")
    assert line.end_reason == "repeats"
    assert len(audio) == 2 * 960 * (REPEATS + len(tokens_of(TEXT)))


def test_an_end_that_the_client_asked_for_is_no_cut(
    gateway: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    counted = gateway.value("cut_off_total", reason="length")
    with gateway.http(headers={"authorization": f"Bearer {KEY}"}) as http:
        short = http.post("/v1/audio/speech", json=body(input=CUT_OFF, max_new_tokens=1))
    assert short.status_code == httpx.codes.OK
    assert gateway.value("cut_off_total", reason="length") == counted
    assert caplog.messages == []


@pytest.mark.parametrize("door", DOORS)
def test_numbers_outside_the_vocabulary_harm_no_speech(gateway: GatewayRig, door: str) -> None:
    """Numbers of the language model at the start, within and at the end of a text."""
    skipped = gateway.value("skipped_numbers_total", reason="outside")
    with opened(gateway, door) as line:
        marks, plain = line.say(MARKS), line.say("One two three.")
    assert_same(marks, np.frombuffer(plain, np.int16))
    assert gateway.value("skipped_numbers_total", reason="outside") == skipped + 4


@pytest.mark.parametrize(
    ("texts", "streams", "reason"),
    [
        (STREAMS, 1, f"gateway: {STREAMS} texts are being spoken; try again later"),
        (0, 3, f"speech server: streams: all {SERVER_STREAMS} are in use; try again later"),
    ],
    ids=["gateway", "server"],
)
def test_the_limit_of_the_gateway_comes_before_that_of_the_server(
    gateway: GatewayRig,
    speaker: LanguageModel,
    rig: DoorServer,
    voice: ClientVoice,
    texts: int,
    streams: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = gateway.value("refused_total", status="429" if texts else "503")
    with ExitStack() as stack:
        if texts:
            monkeypatch.setattr(speaker, "holds_after", 1)
        for _ in range(texts):
            stack.enter_context(opened(gateway, "socket")).begin(TEXT)
        for _ in range(streams):
            client = stack.enter_context(Client(rig.server.grpc_url))
            stack.enter_context(client.open(voice)).push([1, 2, 3])
        until(lambda: rig.model.pipeline.open_streams == SERVER_STREAMS)
        for door in DOORS:
            with opened(gateway, door) as line:
                assert not line.say("One.")
                assert line.error == reason
    assert gateway.value("refused_total", status="429" if texts else "503") > refused


@pytest.mark.parametrize("door", SESSIONS)
def test_an_idle_session_ends(gateway: GatewayRig, door: str) -> None:
    with opened(gateway, door) as line:
        assert line.say("One.")
        assert not b"".join(line.pieces())
        assert f"no message for {IDLE_S:g} s" in line.error


@pytest.mark.parametrize("door", SESSIONS)
def test_sockets_above_the_limit_are_refused(gateway: GatewayRig, door: str) -> None:
    with ExitStack() as stack:
        for _ in range(SOCKETS):
            stack.enter_context(opened(gateway, "socket"))
        until(lambda: gateway.value("sockets") == SOCKETS)
        refused = stack.enter_context(opened(gateway, door))
        assert not b"".join(refused.pieces())
        assert f"{SOCKETS} sockets are open" in refused.error
