"""Trace contexts of clients reach the language model through every door of the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.sync.client import connect

from examples.speech import language_model
from tests.served.test_gateway import body
from tests.support.gateway_rig import VOICE, GatewayRig, serving, tokens_of
from tests.support.patience import PATIENCE_SECONDS
from tests.support.server_rig import Rig
from token2wav_client import ClientVoice

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


class Noting:
    """Application that notes the trace contexts of its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.traces: list[str] = []
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            self.traces.append(headers.get(b"traceparent", b"").decode())
        await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def speaker() -> Noting:
    return Noting(language_model.create_app(tokens_of, 1000.0))


@pytest.fixture(scope="module")
def gateway(
    rig: Rig, speaker: Noting, voice: ClientVoice, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayRig]:
    with (
        serving(speaker) as port,
        GatewayRig.start(
            tmp_path_factory.mktemp("gateway"),
            grpc_url=rig.server.grpc_url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={"voices": {"default": VOICE}},
            riva=True,
        ) as started,
    ):
        yield started


def over_http(gateway: GatewayRig) -> None:
    httpx.post(f"{gateway.url}/v1/audio/speech", json=body(), headers=HEADERS)


def over_a_websocket(gateway: GatewayRig) -> None:
    messages = [{"voice": VOICE}, {"type": "input.text", "text": "One."}, {"type": "input.done"}]
    converse(gateway, "audio/speech/stream", messages, "session.done")


def in_realtime(gateway: GatewayRig) -> None:
    content = [{"type": "input_text", "text": "One."}]
    item = {"type": "message", "role": "user", "content": content}
    messages = [{"type": "conversation.item.create", "item": item}, {"type": "response.create"}]
    converse(gateway, "realtime", messages, "response.done")


def converse(gateway: GatewayRig, path: str, messages: Sequence[object], last: str) -> None:
    url = f"{gateway.url.replace('http', 'ws')}/v1/{path}"
    with connect(url, additional_headers=HEADERS, close_timeout=1) as socket:
        for message in messages:
            socket.send(json.dumps(message))
        while True:
            event = socket.recv(timeout=PATIENCE_SECONDS)
            if isinstance(event, str) and json.loads(event)["type"] in (last, "error"):
                break


def over_riva(gateway: GatewayRig) -> None:
    client = pytest.importorskip("riva.client")
    auth = client.Auth(uri=gateway.riva, metadata_args=[list(pair) for pair in HEADERS.items()])
    client.SpeechSynthesisService(auth).synthesize("One.", VOICE)


@pytest.mark.parametrize("door", [over_http, over_a_websocket, in_realtime, over_riva])
def test_the_language_model_gets_the_trace(
    gateway: GatewayRig, speaker: Noting, door: Callable[[GatewayRig], None]
) -> None:
    speaker.traces.clear()
    door(gateway)
    # Where spans are recorded, the trace has the parent of the request.
    assert [trace.split("-")[1] for trace in speaker.traces] == [TRACE]
