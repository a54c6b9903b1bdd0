"""Limits of the gateway and of a full speech server: a text that exceeds both gets 429."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from websockets.sync.client import connect

from examples.speech import language_model
from testkit.patience import until
from testkit.rigs.gateway_rig import GatewayRig, serving, tokens_of
from testkit.rigs.gateway_speech import body, error_of
from testkit.rigs.server_rig import Rig
from tests.served.test_gateway_sockets import CONFIG, address
from token2wav_client import Client, ClientVoice

PACE = 0.1  # tokens per second: a text has one token for 10 s, and no audio


@pytest.mark.parametrize(
    ("streams", "status", "reason"),
    [
        (1, 429, "gateway: 1 texts are being spoken; try again later"),
        (2, 503, "speech server: streams: all 2 are in use; try again later"),
    ],
)
def test_the_limit_of_the_gateway_comes_first(
    limited: Rig, voice: ClientVoice, streams: int, status: int, reason: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(serving(language_model.create_app(tokens_of, PACE)))
        gateway = stack.enter_context(
            GatewayRig.start(
                tmp_path,
                grpc_url=limited.server.grpc_url,
                language_model_url=f"http://127.0.0.1:{port}/v1",
                voice=voice,
                settings={"limits": {"streams": streams}},
            )
        )
        speaking = stack.enter_context(connect(address(gateway), close_timeout=1))
        for message in (CONFIG, {"type": "input.text", "text": "One two.\n"}):
            speaking.send(json.dumps(message))
        client = stack.enter_context(Client(limited.server.grpc_url))
        stack.enter_context(client.open(voice)).push([1, 2, 3])
        until(lambda: limited.open_streams()["engine"] == 2)
        http = stack.enter_context(gateway.http())
        error = error_of(http.post("/v1/audio/speech", json=body()), status)
        assert error["message"] == reason
