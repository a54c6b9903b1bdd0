"""Trace contexts of clients reach the language model, over HTTP and the WebSocket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest
from websockets.sync.client import connect

from examples.speech import language_model
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig, TraceRecorder, tokens_of
from testkit.rigs.gateway_speech import body
from testkit.rigs.server_rig import Rig
from token2wav_client import ClientVoice

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture(scope="module")
def speaker() -> TraceRecorder:
    return TraceRecorder(language_model.create_app(tokens_of, 1000.0))


@pytest.fixture(scope="module")
def gateway(
    rig: Rig, speaker: TraceRecorder, voice: ClientVoice, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayRig]:
    with GatewayRig.between(
        speaker,
        tmp_path_factory.mktemp("gateway"),
        grpc_url=rig.server.grpc_url,
        voice=voice,
    ) as started:
        yield started


def over_http(gateway: GatewayRig) -> None:
    httpx.post(f"{gateway.url}/v1/audio/speech", json=body(), headers=HEADERS)


def over_a_websocket(gateway: GatewayRig) -> None:
    url = f"{gateway.url.replace('http', 'ws')}/v1/audio/speech/stream"
    with connect(url, additional_headers=HEADERS, close_timeout=1) as socket:
        socket.send(json.dumps({"voice": VOICE, "events": "json"}))
        socket.send(json.dumps({"type": "input.text", "text": "One."}))
        socket.send(json.dumps({"type": "input.done"}))
        while json.loads(socket.recv(timeout=PATIENCE_SECONDS))["type"] != "session.done":
            pass


@pytest.mark.parametrize("door", [over_http, over_a_websocket])
def test_the_language_model_gets_the_trace(
    gateway: GatewayRig, speaker: TraceRecorder, door: Callable[[GatewayRig], None]
) -> None:
    speaker.traces.clear()
    door(gateway)
    # Where spans are recorded, the trace has the parent of the request.
    assert [trace.split("-")[1] for trace in speaker.traces] == [TRACE]
