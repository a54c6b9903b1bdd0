"""Command `token2wav gateway` as a process: its metrics, its log, and its end after a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import httpx
import numpy as np
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from safetensors.numpy import save_file
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_lines import DOORS
from testkit.rigs.gateway_rig import (
    TEMPLATE,
    VOICE,
    GatewayRig,
    key_settings,
    serving,
    tokens_of,
)
from testkit.rigs.gateway_speech import assert_same, expected
from testkit.rigs.raw_server import EVENTS_HEAD, raw_server, read_request, sends
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_client.voice import FIELDS
from token2wav_gateway import server
from token2wav_gateway.settings import LimitSettings
from token2wav_server import Ports
from token2wav_server.demo import language_model

PACE = 30.0  # tokens per second, so that the texts last for seconds
COMMAND = ["-m", "token2wav", "gateway"]
SENTENCE, SENTENCES = "One two three four five six seven eight nine ten.", 3
KEY, MODEL_KEY, WORDS = "key-of-a-shop", "key-of-the-model", "words-of-a-client"
SECRETS = [KEY, MODEL_KEY, WORDS, "key-in-an-address", "wrong-key"]
# A token, and an error that repeats the words.
ANSWER = (
    'data: {"choices": [{"text": "<|s_1|>"}]}\n\n'
    f'data: {{"error": "context of {WORDS} with {MODEL_KEY}"}}\n\n'
)
AT_DEBUG = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
from token2wav_gateway.cli import main
sys.exit(main())
"""


def answers(url: str) -> bool:
    with suppress(OSError), urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        return bool(answer.status == 200)
    return False


@contextmanager
def running(
    rig: DoorServer,
    voice: ClientVoice,
    language_model_port: int,
    folder: Path,
    module: list[str],
    **variables: str,
) -> Iterator[tuple[subprocess.Popen[bytes], GatewayRig, Ports]]:
    """Runs the command between two servers, and checks that it ends with status 0."""
    (voices := folder / "voices").mkdir()
    save_file({name: getattr(voice, name) for name in FIELDS}, voices / f"{VOICE}.safetensors")
    settings = {
        "language_model": {
            "url": f"http://127.0.0.1:{language_model_port}/v1",
            "template": TEMPLATE,
            "api_key": MODEL_KEY,
        },
        "speech_server": {"url": rig.server.grpc_url, "response_timeout_s": PATIENCE_SECONDS},
        "voices": {"folder": str(voices), "default": VOICE},
        "keys": [key_settings("shop", KEY)],
    }
    (folder / "gateway.yaml").write_text(yaml.safe_dump(settings))
    ports = Ports.free()
    command = [sys.executable, *module, "--config", str(folder / "gateway.yaml")]
    command += ["--port", str(ports.http), "--metrics-port", str(ports.metrics)]
    command += ["--riva-port", str(ports.grpc)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables
        )
    try:
        url, riva = f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"
        until(lambda: answers(f"{url}/health/live") or process.poll() is not None)
        yield process, GatewayRig(url, CollectorRegistry(), voices, riva), ports
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_open_texts_end_before_the_command_ends(
    rig: DoorServer, model: Token2Wav, voice: ClientVoice, tmp_path: Path, number: signal.Signals
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    # uvicorn prefers this package if it can be imported, but its parser bounds no headers. The
    # gateway must not use it; an empty module would answer no request.
    (tmp_path / "httptools.py").touch()
    sentence = expected(model, voice, SENTENCE)
    # Sessions speak sentence by sentence. A longer sentence would round in another way.
    sentences = {"socket": SENTENCES, "realtime": SENTENCES, "riva": 1, "http": 1}
    audio: dict[str, bytes] = {}
    with (
        serving(language_model.create_app(tokens_of, PACE)) as port,
        running(rig, voice, port, tmp_path, COMMAND, PYTHONPATH=str(tmp_path)) as served,
        ExitStack() as stack,
    ):
        process, gateway, ports = served
        lines = {door: stack.enter_context(DOORS[door](gateway, KEY)) for door in sentences}
        for door, line in lines.items():  # the last one waits for its first audio
            line.begin(" ".join([SENTENCE] * sentences[door]))
        metrics = httpx.get(f"http://127.0.0.1:{ports.metrics}/metrics").text
        assert "token2wav_gateway_speaking" in metrics
        process.send_signal(number)
        for door, line in reversed(lines.items()):  # the sessions speak longest
            answers_of_text = sentences[door] if door == "socket" else 1
            pieces = (piece for _ in range(answers_of_text) for piece in line.pieces())
            audio[door] = b"".join(pieces)
        assert not b"".join(lines["socket"].pieces())
        assert "1001" in lines["socket"].error
        with pytest.raises(ConnectionClosed, match="1001"):
            list(lines["realtime"].pieces())
    for door, count in sentences.items():
        assert_same(audio[door], np.concatenate([sentence] * count))
    log = (tmp_path / "log").read_text()
    assert "Shutting down" in log
    assert "Traceback" not in log
    assert KEY not in log
    assert "three" not in log


def test_a_second_interrupt_ends_open_texts(
    rig: DoorServer, voice: ClientVoice, tmp_path: Path
) -> None:
    asked = threading.Semaphore(0)

    def never(connection: socket.socket) -> None:
        read_request(connection)
        asked.release()
        connection.recv(1)  # until the gateway has left

    with (
        raw_server(never) as port,
        running(rig, voice, port, tmp_path, COMMAND) as (process, gateway, _),
        DOORS["socket"](gateway, KEY) as session,
        DOORS["riva"](gateway, KEY) as call,
    ):
        for line in (session, call):
            line.begin("One.")
            assert asked.acquire(timeout=PATIENCE_SECONDS)
        process.send_signal(signal.SIGINT)
        until(lambda: not answers(f"{gateway.url}/health/live"))
        process.send_signal(signal.SIGINT)
        assert not b"".join(call.pieces())
        assert call.error == "Cancelling all calls"
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_an_application_that_does_not_end_is_left_after_a_second_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_END_S", 0.1)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await asyncio.Event().wait()

    app = FastAPI(lifespan=lifespan)
    app.state.sockets = SimpleNamespace(count=0, drain=lambda: None)
    config = server.BoundedConfig(app, LimitSettings(), host="127.0.0.1", port=Ports.free().http)

    async def interrupt() -> None:
        draining = server.DrainingServer(config, app)
        serving = asyncio.create_task(draining.serve())
        while not draining.started:
            await asyncio.sleep(0.01)
        draining.should_exit = draining.force_exit = True
        await asyncio.wait_for(serving, PATIENCE_SECONDS)

    asyncio.run(interrupt())


def use(url: str) -> None:
    """Sends words and keys by every door."""
    body = {"model": "tts-1", "voice": VOICE, "input": WORDS, "instructions": WORDS}
    key = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=key, timeout=PATIENCE_SECONDS) as http:
        assert http.get(f"/health/ready?key={KEY}").status_code == 200
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": WORDS}
        assert http.post("/v1/audio/speech", json=body, headers=trace).status_code == 502
        wrong = {"authorization": "Bearer wrong-key"}
        assert http.post("/v1/audio/speech", json=body, headers=wrong).status_code == 401
        assert http.post("/v1/audio/speech", json={**body, WORDS: 1}).status_code == 400
        assert http.post("/v1/audio/speech", content=f'{{"{WORDS}').status_code == 400
        assert http.get(f"/v1/models/{WORDS}").status_code == 404
        form = {"name": WORDS, "ref_text": WORDS}
        files = {"audio_sample": (WORDS, WORDS.encode())}
        assert http.post("/v1/audio/voices", data=form, files=files).status_code == 400
        assert http.delete(f"/v1/audio/voices/{WORDS}").status_code == 404
    stream = f"ws{url.removeprefix('http')}/v1/audio/speech/stream?key=key-in-an-address"
    with connect(stream, additional_headers=key) as socket:
        socket.send(json.dumps({"type": "session.config", "voice": VOICE}))
        socket.send(json.dumps({"type": "input.text", "text": f"{WORDS}. {WORDS}. "}))
        socket.send(json.dumps({"type": "input.done"}))
        socket.send(json.dumps({"type": "session.close"}))
        assert "error" in {json.loads(message)["type"] for message in socket}
    with connect(stream, additional_headers=key) as socket, suppress(ConnectionClosed):
        socket.send(WORDS)
        list(socket)


@pytest.mark.parametrize("module", [COMMAND, ["-c", AT_DEBUG]])
def test_no_words_and_no_keys_in_the_log(
    rig: DoorServer, voice: ClientVoice, tmp_path: Path, module: list[str]
) -> None:
    """Whatever the level of the root logger."""
    with (
        raw_server(sends(EVENTS_HEAD + ANSWER.encode())) as model,
        running(rig, voice, model, tmp_path, module) as (process, gateway, _),
    ):
        use(gateway.url)
        process.terminate()
    text = (tmp_path / "log").read_text()
    assert "a text failed: language model: error" in text
    assert ("DEBUG" in text) == (module[0] == "-c")
    assert [secret for secret in SECRETS if secret in text] == []
