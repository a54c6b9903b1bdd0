"""Riva's gRPC interface of the gateway, with NVIDIA's client: equal to the library's audio."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import numpy as np
import pytest
import riva.client
import soundfile
from riva.client import AudioEncoding
from riva.client.proto import riva_common_pb2 as common
from riva.client.proto import riva_tts_pb2 as messages

from examples import demo
from examples.demo_voice.recordings import PROMPT
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.gateway_fixtures import StartGateway
from testkit.rigs.gateway_rig import VOICE, GatewayRig, key_settings, tokens_of
from testkit.rigs.gateway_speech import TEXT, assert_same, expected
from testkit.rigs.language_model import LanguageModel
from testkit.rigs.raw_grpc import UnfinishedCall
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_gateway.access import Access
from token2wav_gateway.doors.riva import RivaSpeech
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech.content import Text

KEY = "a key"
SLOW = "slow " * 200
IDLE_S = 2.0
BODY = 10_000  # bytes of a message without its recording
LARGEST = (1 << 20) + BODY
PACE = 250.0  # tokens per second
SETTINGS = {
    "voices": {"model": demo.MODEL, "default": VOICE, "longest_s": 10},
    "limits": {
        "idle_s": IDLE_S,
        "text_characters": 1000,
        "body_bytes": BODY,
        "upload_bytes": LARGEST - BODY,
        "sockets": 8,
    },
    "keys": [
        key_settings("shop", KEY, streams=3),
        key_settings("many", "many"),
        key_settings("once", "once", requests_per_minute=2),
    ],
}


def service(
    gateway: GatewayRig, key: str = KEY, **options: Any
) -> riva.client.SpeechSynthesisService:
    metadata = [["authorization", f"Bearer {key}"]] if key else []
    auth = riva.client.Auth(uri=gateway.riva, metadata_args=metadata, **options)
    return riva.client.SpeechSynthesisService(auth)


@pytest.fixture
def client(gateway: GatewayRig) -> Iterator[riva.client.SpeechSynthesisService]:
    client = service(gateway)
    yield client
    client.auth.channel.close()


def request(**fields: Any) -> messages.SynthesizeSpeechRequest:
    return messages.SynthesizeSpeechRequest(**{"text": TEXT, "sample_rate_hz": 24_000} | fields)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Returns the status of a call that fails, and its sentence."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call()) if callable(call) else list(call)
    return raised.value.code(), raised.value.details()


@pytest.mark.parametrize("name", [f"token2wav.{VOICE}", None])
def test_a_stream_speaks_its_texts_one_after_the_other(
    client: riva.client.SpeechSynthesisService,
    model: Token2Wav,
    voice: ClientVoice,
    name: str | None,
) -> None:
    texts = [TEXT, "one two", "three four five"]
    pieces = list(client.synthesize_online(texts, name, sample_rate_hz=24_000))
    assert len(pieces) > len(texts)
    assert [piece.meta.text for piece in pieces if piece.meta.text] == texts
    whole = np.concatenate([expected(model, voice, text) for text in texts])
    assert_same(b"".join(piece.audio for piece in pieces), whole)


def test_ogg_opus(
    client: riva.client.SpeechSynthesisService, model: Token2Wav, voice: ClientVoice
) -> None:
    speech = client.synthesize(TEXT, VOICE, encoding=AudioEncoding.OGGOPUS, sample_rate_hz=16_000)
    audio, decoded_hz = soundfile.read(io.BytesIO(speech.audio))
    seconds = len(expected(model, voice, TEXT)) / 24_000
    assert len(audio) / decoded_hz == pytest.approx(seconds, abs=0.05)
    assert np.abs(audio).max() > 0.01


def test_a_recording_is_the_voice_of_one_request(
    client: riva.client.SpeechSynthesisService, gateway: GatewayRig
) -> None:
    before = sorted(gateway.voices.iterdir())
    prompt = PROMPT
    spoken = client.synthesize(
        TEXT,
        sample_rate_hz=24_000,
        zero_shot_audio_prompt_file=prompt,
        zero_shot_transcript="words of the recording",
    )
    assert len(spoken.audio) == 2 * 960 * len(tokens_of(TEXT))
    named = client.synthesize(TEXT, VOICE, sample_rate_hz=24_000)
    assert spoken.audio != named.audio
    pieces = client.synthesize_online(
        [TEXT, TEXT], sample_rate_hz=24_000, zero_shot_audio_prompt_file=prompt
    )
    assert b"".join(piece.audio for piece in pieces) == 2 * spoken.audio
    assert sorted(gateway.voices.iterdir()) == before


def test_voices_are_listed_for_clients_with_a_key(gateway: GatewayRig) -> None:
    """NVIDIA's example and Pipecat send no key with this call."""
    stub, request = service(gateway).stub, messages.RivaSynthesisConfigRequest()
    for metadata, subvoices in (((), ""), ((("authorization", f"Bearer {KEY}"),), f"{VOICE}:0")):
        (config,) = stub.GetRivaSynthesisConfig(request, metadata=metadata).model_config
        assert config.model_name == "token2wav"
        assert config.parameters["voice_name"] == "token2wav"
        assert config.parameters["subvoices"] == subvoices
    request.model_name = "radtts"
    assert refusal(lambda: [stub.GetRivaSynthesisConfig(request)])[0] == grpc.StatusCode.NOT_FOUND


def test_the_id_of_a_request_comes_back(client: riva.client.SpeechSynthesisService) -> None:
    spoken = client.stub.Synthesize(
        request(
            id=common.RequestId(value="seven"), custom_configuration={"instructions": "slowly"}
        ),
        metadata=client.auth.get_auth_metadata(),
    )
    assert spoken.id.value == "seven"
    assert spoken.meta.text == TEXT


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"text": " "}, "INVALID_ARGUMENT", "text: empty; a text is needed"),
        ({"text": "x" * 1001}, "INVALID_ARGUMENT", "input: 1001 characters; at most 1000 are"),
        ({"text": "x" * 20_000}, "RESOURCE_EXHAUSTED", "request: larger than 10000 bytes"),
        ({"voice_name": "nobody"}, "NOT_FOUND", "voice: 'nobody' is not one of: anna"),
        ({"voice_name": "../anna"}, "NOT_FOUND", "voice: '../anna' is not one of: anna"),
        ({"sample_rate_hz": 12_345}, "INVALID_ARGUMENT", "sample_rate_hz: 12345 is not one of 8"),
        ({"sample_rate_hz": -1}, "INVALID_ARGUMENT", "sample_rate_hz: -1 is not one of 8000"),
        (
            {"encoding": AudioEncoding.OGGOPUS, "sample_rate_hz": 44_100},
            "INVALID_ARGUMENT",
            "sample_rate_hz: 44100 is not one of 8000, 16000, 24000, 48000",
        ),
        (
            {"encoding": AudioEncoding.FLAC},
            "INVALID_ARGUMENT",
            "encoding: FLAC is not one of LINEAR_PCM, OGGOPUS, MULAW, ALAW",
        ),
        (
            {"encoding": 99},
            "INVALID_ARGUMENT",
            "encoding: 99 is not one of LINEAR_PCM, OGGOPUS, MULAW, ALAW",
        ),
        ({"language_code": "klingon"}, "INVALID_ARGUMENT", "language_code: 'klingon' is neither"),
        (
            {"custom_configuration": {"instructions": "x" * 1001}},
            "INVALID_ARGUMENT",
            "instructions: 1001 characters",
        ),
        ({"custom_dictionary": "a  b"}, "INVALID_ARGUMENT", "custom_dictionary: not supported"),
        (
            {"custom_configuration": {"exaggeration": "2"}},
            "INVALID_ARGUMENT",
            "custom_configuration: 'exaggeration' is not a known key; the only one is",
        ),
        (
            {"zero_shot_data": {"audio_prompt": b"no audio"}},
            "INVALID_ARGUMENT",
            "zero_shot_data.audio_prompt: the recording: cannot be read as audio",
        ),
        (
            {"zero_shot_data": {"audio_prompt": b"x" * (1 << 20) + b"x"}},
            "RESOURCE_EXHAUSTED",
            "zero_shot_data.audio_prompt: larger than 1048576 bytes",
        ),
        (
            {"zero_shot_data": {"audio_prompt": b"x" * (4 << 20)}},
            "RESOURCE_EXHAUSTED",
            "Received message larger than max",
        ),
        (
            {"zero_shot_data": {"audio_prompt": b"x", "transcript": "x" * 1001}},
            "RESOURCE_EXHAUSTED",
            "zero_shot_data.transcript: 1001 characters; at most 1000 are allowed",
        ),
        ({"text": "nothing"}, "UNAVAILABLE", "language model: status 400"),
    ],
)
def test_a_wrong_request_gets_a_status_and_a_sentence(
    client: riva.client.SpeechSynthesisService, fields: dict[str, Any], code: str, sentence: str
) -> None:
    metadata = client.auth.get_auth_metadata()
    for call in (
        lambda: [client.stub.Synthesize(request(**fields), metadata=metadata)],
        lambda: client.stub.SynthesizeOnline(iter([request(**fields)]), metadata=metadata),
    ):
        status, details = refusal(call)
        assert status == getattr(grpc.StatusCode, code), details
        assert sentence in details


@pytest.mark.parametrize(
    ("code", "language"), [("", "Auto"), ("en-US", "Auto"), ("de-DE", "German"), ("nl", "nl")]
)
def test_the_language_of_a_text(code: str, language: str) -> None:
    async def checked() -> Text:
        gateway = Gateway(Settings(), Access(()), Metrics())
        try:
            return (await RivaSpeech(gateway)._checked(request(language_code=code)))[0]
        finally:
            await gateway.close()

    assert asyncio.run(checked()).language == language


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_call_without_a_valid_key_is_refused_before_its_message_is_read(
    gateway: GatewayRig, key: str
) -> None:
    """The message is larger than any that the gateway reads, so a reader would say so."""
    client = service(gateway, key)
    huge = request(zero_shot_data={"audio_prompt": b"x" * (8 << 20)})
    metadata = client.auth.get_auth_metadata()
    for call in (
        lambda: [client.stub.Synthesize(huge, metadata=metadata)],
        lambda: client.stub.SynthesizeOnline(iter([huge]), metadata=metadata),
    ):
        status, details = refusal(call)
        assert status == grpc.StatusCode.UNAUTHENTICATED
        assert details == "authorization: a valid key is needed, as 'Bearer KEY'"


def test_each_text_of_a_call_is_a_request_of_the_key(gateway: GatewayRig) -> None:
    once = service(gateway, "once")
    details = refusal(lambda: once.synthesize_online(["one two", "three", "four"], VOICE))[1]
    assert details == "key once: 2 requests a minute are allowed"


def test_messages_that_never_end_fill_no_memory(
    gateway: GatewayRig,
    client: riva.client.SpeechSynthesisService,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Five messages lack their last bytes, and all clients may have four such messages."""

    def attack() -> bool:
        with suppress(ConnectionError), ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(unfinished(gateway, "many")).send(LARGEST - 1)
            assert client.synthesize(TEXT, VOICE).audio
        return (
            f"unfinished messages of Riva's interface have more than {4 * LARGEST}" in caplog.text
        )

    until(attack)  # an idle call ends after 2 s, maybe before the bytes have arrived
    assert client.synthesize(TEXT, VOICE).audio


def test_a_call_is_admitted_before_its_message_is_read(gateway: GatewayRig) -> None:
    client = service(gateway)

    def refused() -> bool:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(unfinished(gateway)).send(100)
            try:
                client.synthesize(TEXT, VOICE)
            except grpc.RpcError as error:
                return "key shop: 3 requests are running" in str(error)
        return False

    def spoken() -> bool:
        with suppress(grpc.RpcError):
            return bool(client.synthesize(TEXT, VOICE).audio)
        return False

    until(refused)  # the calls arrive on connections of their own
    until(spoken)  # and count until the gateway sees that their connections are closed


def unfinished(gateway: GatewayRig, key: str = KEY) -> UnfinishedCall:
    method = "/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize"
    return UnfinishedCall(gateway.riva, method, LARGEST, {"authorization": f"Bearer {key}"})


def test_bytes_that_are_no_message_are_refused(gateway: GatewayRig) -> None:
    path = "/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize"
    metadata = [("authorization", f"Bearer {KEY}")]
    with grpc.insecure_channel(gateway.riva) as channel:
        call = channel.unary_unary(path)
        status, details = refusal(lambda: [call(b"\xff" * 10, metadata=metadata)])
        assert (status, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request: not a message of Riva's interface",
        )
        silent = channel.stream_stream(path)
        status, details = refusal(lambda: silent(iter([]), metadata=metadata))
        assert (status, details) == (grpc.StatusCode.INVALID_ARGUMENT, "request: missing")
        unknown = channel.unary_unary("/nvidia.riva.asr.RivaSpeechRecognition/Recognize")
        assert refusal(lambda: [unknown(b"")])[0] == grpc.StatusCode.UNIMPLEMENTED


def test_a_compressed_message_is_refused(client: riva.client.SpeechSynthesisService) -> None:
    """A few kilobytes can hold gigabytes."""
    bomb = request(zero_shot_data={"audio_prompt": bytes(8 << 20)})
    status, details = refusal(
        lambda: [
            client.stub.Synthesize(
                bomb,
                metadata=client.auth.get_auth_metadata(),
                compression=grpc.Compression.Gzip,
            )
        ]
    )
    assert status == grpc.StatusCode.UNIMPLEMENTED, details


def test_a_reader_that_does_not_read_is_dropped(gateway: GatewayRig) -> None:
    """Its texts together are more than a connection buffers."""
    client = service(
        gateway,
        options=[("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)],
    )
    before = gateway.value("refused_total", status="408")
    call = client.synthesize_online([SLOW] * 50, VOICE, sample_rate_hz=48_000)
    next(call)
    until(lambda: gateway.value("refused_total", status="408") == before + 1)
    until(lambda: gateway.value("speaking") == 0)
    status, details = refusal(call)
    assert status == grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "response: the client has read nothing for 2 s"


def test_connections_and_calls_above_the_limit_are_refused(gateway: GatewayRig) -> None:
    """Idle calls of one connection, and then idle connections, take all places for 2 s."""
    client, ended = service(gateway), threading.Event()

    def none() -> Iterator[messages.SynthesizeSpeechRequest]:
        ended.wait(PATIENCE_SECONDS)
        yield from ()

    metadata = client.auth.get_auth_metadata()
    calls = [client.stub.SynthesizeOnline(none(), metadata=metadata) for _ in range(20)]
    statuses = [refusal(call) for call in calls]
    ended.set()
    late = [status for status, _ in statuses if status == grpc.StatusCode.DEADLINE_EXCEEDED]
    full = [status for status, _ in statuses if status == grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert 0 < len(late) <= 8
    assert "request: no message for 2 s" in {details for _, details in statuses}
    assert len(late) + len(full) == 20, statuses
    assert client.synthesize(TEXT, VOICE).audio
    client.auth.channel.close()
    channels = [
        grpc.insecure_channel(gateway.riva, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(12)
    ]
    ready = [grpc.channel_ready_future(channel) for channel in channels]
    until(lambda: any(future.done() for future in ready))
    time.sleep(0.5)  # for the others
    assert sum(future.done() for future in ready) <= 8
    for channel in channels:
        channel.close()
    assert service(gateway).synthesize(TEXT, VOICE).audio


def test_the_gateway_speaks_to_the_end_before_it_ends(
    start_gateway: StartGateway, speaker: LanguageModel, voice: ClientVoice, model: Token2Wav
) -> None:
    """A stream that waits for another text is told."""
    received: list[bytes] = []
    waiting = threading.Event()

    def texts() -> Iterator[messages.SynthesizeSpeechRequest]:
        yield request()
        waiting.wait(PATIENCE_SECONDS)

    settings = {"voices": {"default": VOICE}}
    with start_gateway(speaker.app(), settings=settings, riva=True) as started:
        client = service(started, "")
        call = client.stub.SynthesizeOnline(texts())
        received.append(next(call).audio)

    with pytest.raises(grpc.RpcError) as raised:
        received.extend(piece.audio for piece in call)
    waiting.set()
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "gateway: shutting down; try again later"
    assert_same(b"".join(received), expected(model, voice, TEXT))
