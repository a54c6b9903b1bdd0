"""Words with times: the gateway in front of a server with the demo voice and an aligner."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import riva.client
import soundfile
import soxr
from numpy.typing import NDArray

from examples import demo
from examples.demo_voice.recordings import SENTENCE
from examples.demo_voice.text import held_out
from testkit.batches import WHOLE_BLOCKS
from testkit.models.front_end import demo_prompt, front_end, spoken
from testkit.patience import until
from testkit.rigs.aligners import align, installed
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import VOICE, GatewayRig, serving
from testkit.rigs.gateway_socket import opened
from testkit.rigs.gateway_speech import events_of
from token2wav.config import ServerConfig
from token2wav_client import ClientVoice
from token2wav_gateway.words.pocketsphinx_aligner import PocketsphinxAligner
from token2wav_server.demo import language_model
from token2wav_voice import FrontEnd, Recording

__all__ = ["demo_prompt", "front_end", "spoken"]

TEXT = held_out()[0]
PACE = 1000.0  # tokens per second
NEAR_S = 0.1  # the voice says the words of the recording, a little differently


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    config = ServerConfig(WHOLE_BLOCKS)
    with DoorServer.start(demo.MODEL, tmp_path_factory.mktemp("repository"), config) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(served: DoorServer) -> Iterator[None]:
    yield
    served.wait_until_empty()


@pytest.fixture(scope="module")
def speaker(front_end: FrontEnd) -> Iterator[str]:
    """URL of a language model that says the sentence of the demo for every text."""
    tokens = front_end.tokens(Recording.load(SENTENCE)).tolist()
    with serving(language_model.create_app(lambda text: tokens, PACE)) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def gateways(
    served: DoorServer, speaker: str, spoken: ClientVoice, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    @contextmanager
    def start(**aligner: Any) -> Iterator[GatewayRig]:
        with (
            installed(tmp_path_factory.mktemp("site")),
            GatewayRig.start(
                tmp_path_factory.mktemp("gateway"),
                grpc_url=served.server.grpc_url,
                language_model_url=speaker,
                voice=spoken,
                settings={"aligner": aligner},
                riva=True,
            ) as rig,
        ):
            yield rig

    return start


def body(**fields: Any) -> dict[str, Any]:
    usual = {"input": TEXT, "model": "tts-1", "voice": VOICE, "response_format": "pcm"}
    return usual | {"stream_format": "sse", "word_timestamps": True} | fields


def events(gateway: GatewayRig, **fields: Any) -> list[dict[str, Any]]:
    with gateway.http() as http:
        answer = http.post("/v1/audio/speech", json=body(**fields))
    assert answer.status_code == 200, answer.text
    return list(events_of(answer.text.splitlines()))


def audio_of(received: list[dict[str, Any]]) -> NDArray[np.int16]:
    pieces = [
        base64.b64decode(event["audio"])
        for event in received
        if event["type"] == "speech.audio.delta"
    ]
    return np.frombuffer(b"".join(pieces), "<i2")


def words_of(received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [word for event in received for word in event.get("timestamps") or ()]


def test_words_have_the_times_of_the_recording(gateways: Any) -> None:
    with gateways(name="pocketsphinx", timeout_s=60) as gateway:
        received = events(gateway)
        plain = events(gateway, word_timestamps=False)
        assert gateway.value("alignments_total", outcome="done") == 1
    *deltas, last, done = received
    assert done["type"] == "speech.audio.done"
    assert all(bool(event["audio"]) != ("timestamps" in event) for event in (*deltas, last))
    pieces = [event["type"] for event in deltas if event["audio"]]
    assert [event["type"] for event in plain] == [*pieces, done["type"]]
    audio = audio_of(received)
    assert np.abs(audio.astype(int) - audio_of(plain)).max() <= 1
    seconds = len(audio) / 24_000
    assert last["segments"] == [{"text": TEXT, "start_ms": 0, "end_ms": round(1000 * seconds)}]
    words = words_of(received)
    assert [word["word"] for word in words] == TEXT.split()
    recording, rate = soundfile.read(SENTENCE, dtype="int16")
    expected = align(PocketsphinxAligner(), TEXT, soxr.resample(recording, rate, 16_000))
    starts = np.array([word["start_ms"] / 1000 for word in words])
    assert np.abs(starts - [word.start_s for word in expected]).max() < NEAR_S


def test_without_an_aligner_only_the_whole_text_has_a_time(gateways: Any) -> None:
    with gateways() as gateway:
        *_, last, _ = received = events(gateway)
    milliseconds = round(len(audio_of(received)) / 24)
    assert last["timestamps"] == []
    assert last["segments"] == [{"text": TEXT, "start_ms": 0, "end_ms": milliseconds}]


@pytest.mark.parametrize("name", ["Hangs", "Crashes"])
def test_an_aligner_that_fails_costs_no_audio(gateways: Any, name: str) -> None:
    text = "bad 3"
    with gateways(name=name, timeout_s=4) as gateway, gateway.http() as http:
        arrivals = []
        with http.stream("POST", "/v1/audio/speech", json=body(input=text)) as answer:
            received = []
            for event in events_of(answer.iter_lines()):
                received.append(event)
                arrivals.append(time.monotonic())
        plain = events(gateway, input=text, word_timestamps=False)
        until(lambda: gateway.value("speaking") == 0)
    *deltas, last, done = received
    assert done["type"] == "speech.audio.done"
    assert last["timestamps"] is None
    assert last["segments"][0]["end_ms"] > 1000
    assert np.abs(audio_of(received).astype(int) - audio_of(plain)).max() <= 1
    if name == "Hangs":  # all audio came long before the times were given up
        assert arrivals[-2] - arrivals[len(deltas) - 1] > 2


def test_a_client_that_leaves_meanwhile_leaves_nothing(gateways: Any, served: DoorServer) -> None:
    with gateways(name="Hangs", timeout_s=5) as gateway, gateway.http() as http:
        with http.stream("POST", "/v1/audio/speech", json=body(input="bad")) as answer:
            for event in events_of(answer.iter_lines()):
                if event["samples"] > 24_000:
                    break
        until(lambda: gateway.value("speaking") == 0)
        served.wait_until_empty()


@pytest.mark.parametrize("rate_hz", [16_000, 24_000, 44_100])
def test_the_client_of_riva_gets_the_times(gateways: Any, rate_hz: int) -> None:
    with gateways(name="pocketsphinx", timeout_s=60) as gateway:
        expected = words_of(events(gateway))
        auth = riva.client.Auth(uri=gateway.riva)
        service = riva.client.SpeechSynthesisService(auth)
        options = {"sample_rate_hz": rate_hz, "enable_word_time_offsets": True}
        pieces = list(service.synthesize_online([TEXT, TEXT], VOICE, **options))
        whole = service.synthesize(TEXT, VOICE, **options)
        auth.channel.close()
    assert all(bool(piece.audio) != bool(piece.meta.words) for piece in pieces)
    said = [word for piece in pieces for word in piece.meta.words]
    count = len(TEXT.split())
    for words in (said[:count], said[count:], whole.meta.words):
        assert [word.word for word in words] == TEXT.split()
        times = np.array([(word.start_time, word.end_time) for word in words])
        reference = np.array([(word["start_ms"], word["end_ms"]) for word in expected])
        # The aligner counts in steps of 10 ms, and resampled audio may move a border by a few.
        assert np.abs(times - reference).max() <= 50
    assert whole.audio


def test_the_client_of_riva_without_an_aligner_gets_no_words(gateways: Any) -> None:
    with gateways() as gateway:
        service = riva.client.SpeechSynthesisService(riva.client.Auth(uri=gateway.riva))
        *_, last = service.synthesize_online(TEXT, VOICE, enable_word_time_offsets=True)
        service.auth.channel.close()
    assert not last.audio
    assert not last.meta.words


def test_times_need_events(gateways: Any) -> None:
    with gateways() as gateway, gateway.http() as http:
        answer = http.post("/v1/audio/speech", json=body(stream_format="audio"))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "word_timestamps")
    assert error["message"] == (
        "word_timestamps: needs stream_format sse, because audio alone has no place for times"
    )


def test_words_over_a_websocket_as_in_vllm_omni(gateways: Any) -> None:
    """The audio arrives as chunks without times, and others have the words of the audio before."""
    with gateways(name="pocketsphinx", timeout_s=60) as gateway:
        with opened(gateway, word_timestamps=True, stream_audio=False) as socket:
            assert "stream_audio" in socket.until("error")["message"]
        with opened(gateway, word_timestamps=True, response_format="pcm") as socket:
            socket.send(type="input.text", text=TEXT)
            socket.send(type="input.done")
            socket.until("session.done")
        plain = events(gateway)
    chunks = socket.of("audio.chunk")
    assert [chunk["chunk_id"] for chunk in chunks] == list(range(len(chunks)))
    audio, last = [chunk for chunk in chunks if chunk["audio_b64"]], chunks[-1]
    assert all(chunk["timestamps"] is None for chunk in audio)
    content = b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in audio)
    assert last["audio_b64"] == ""
    assert last["chunk_end_ms"] == audio[-1]["chunk_end_ms"] == round(len(content) / 48)
    assert len(content) == 2 * len(audio_of(plain))
    assert [word["word"] for word in words_of(chunks)] == TEXT.split()
    for chunk in chunks:
        assert all(word["end_ms"] <= chunk["chunk_end_ms"] for word in chunk["timestamps"] or ())
    [done] = socket.of("audio.done")
    assert done["total_bytes"] == len(content)


def test_a_late_aligner_does_not_delay_the_next_sentence(gateways: Any) -> None:
    """Its times are null when the listener has heard the sentence, not at the time-out."""
    with (
        gateways(name="Hangs", timeout_s=60) as gateway,
        opened(gateway, word_timestamps=True) as socket,
    ):
        socket.send(type="input.text", text="A bad one.\nA good one.\n")
        socket.until("audio.chunk")
        began = time.monotonic()
        socket.until("audio.done")
        waited_s = time.monotonic() - began
    chunks = socket.of("audio.chunk")
    assert chunks[-1]["audio_b64"] == ""
    assert chunks[-1]["timestamps"] is None
    # The next sentence has half a second to be made; a busy machine needs longer.
    assert waited_s < chunks[-1]["chunk_end_ms"] / 1000 + 5
