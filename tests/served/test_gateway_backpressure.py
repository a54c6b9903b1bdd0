"""Clients that read slowly, in front of a real server: the language model waits for them."""

from __future__ import annotations

import json
import socket
import time

import numpy as np
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.gateway_rig import VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_socket import CONFIG, address
from testkit.rigs.gateway_speech import assert_same, body, expected
from testkit.rigs.raw_client import until_closed
from testkit.rigs.server_rig import Rig
from tests.served.test_gateway_attacks import port_of, request_of
from token2wav import Token2Wav
from token2wav_client import ClientVoice

AHEAD_S = 5.0
WORDS = "slow " * 300
LENGTH = len(tokens_of(WORDS))  # tokens; 40 ms each
# Tokens of AHEAD_S, of the audio in the buffers of the gateway and the system, and of the chunk
# that the gateway sends.
MOST_TOKENS = (AHEAD_S + 12.0) / 0.04
PACE = 20_000.0  # tokens per second
SETTINGS = {"limits": {"ahead_s": AHEAD_S, "speech_tokens": LENGTH}}


def slow_connection(gateway: GatewayRig) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect(("127.0.0.1", port_of(gateway)))
    return connection


def wait_until_held(gateway: GatewayRig, before: float) -> None:
    """Waits until the language model waits, and checks that few of its tokens were read."""
    until(lambda: gateway.value("held_back") == 1)
    time.sleep(3)  # in which the whole answer would arrive
    assert gateway.value("held_back") == 1
    assert gateway.value("speech_tokens_total") - before < MOST_TOKENS < LENGTH / 3


def test_a_slow_reader_of_http_gets_all_audio(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    before = gateway.value("speech_tokens_total")
    with slow_connection(gateway) as connection:
        connection.sendall(request_of(body(input=WORDS)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_until_held(gateway, before)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        content = until_closed(connection)
    content = content.partition(b"\r\n\r\n")[2] if b"\r\n\r\n" in content[:400] else content
    audio = np.frombuffer(content[len(content) % 2 :], np.int16)
    # The first 4096 bytes have the head, and perhaps samples.
    assert_same(audio.tobytes(), expected(model, voice, WORDS)[-len(audio) :])
    assert len(audio) > 960 * LENGTH - 4096


def test_a_slow_reader_of_a_websocket(gateway: GatewayRig) -> None:
    before = gateway.value("speech_tokens_total")
    connection = slow_connection(gateway)
    connection.settimeout(None)
    with connect(address(gateway), sock=connection, max_queue=1, close_timeout=1) as ws:
        ws.send(json.dumps(CONFIG | {"split_granularity": "none"}))
        ws.send(json.dumps({"type": "input.text", "text": WORDS}))
        ws.send(json.dumps({"type": "input.done"}))
        wait_until_held(gateway, before)
        samples = 0
        for message in ws:
            if isinstance(message, bytes):
                samples += len(message) // 2
            elif json.loads(message)["type"] == "session.done":
                break
    assert samples == 960 * LENGTH


def test_codes_of_a_slow_reader_wait_too(gateway: GatewayRig, rig: Rig) -> None:
    codes = np.resize(tokens_of("one"), LENGTH).tolist()
    content = json.dumps({"codes": codes, "voice": VOICE, "stream": True}).encode()
    head = f"POST /v1/stage/run HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    with slow_connection(gateway) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        until(lambda: gateway.value("held_back") == 1)
