"""Command `token2wav gateway` as a process: its metrics, its log, and its end after a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from safetensors.numpy import save_file
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import TEMPLATE, VOICE, key_settings, serving, tokens_of
from testkit.rigs.gateway_speech import assert_same, expected
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_client.voice import FIELDS
from token2wav_server import Ports
from token2wav_server.demo import language_model

PACE = 60.0  # tokens per second, so that the texts last for a second
KEY = "secret-of-a-shop"
TEXT = "one two three four five six seven eight nine ten."


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_open_texts_end_before_the_command_ends(
    rig: DoorServer, model: Token2Wav, voice: ClientVoice, tmp_path: Path, number: signal.Signals
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    (tmp_path / "voices").mkdir()
    tensors = {name: getattr(voice, name) for name in FIELDS}
    save_file(tensors, tmp_path / "voices" / f"{VOICE}.safetensors")
    ports = Ports.free()
    with serving(language_model.create_app(tokens_of, PACE)) as port:
        settings = {
            "language_model": {"url": f"http://127.0.0.1:{port}/v1", "template": TEMPLATE},
            "speech_server": {"url": rig.server.grpc_url},
            "voices": {"folder": str(tmp_path / "voices")},
            "keys": [key_settings("shop", KEY)],
        }
        (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "token2wav", "gateway", "--port", str(ports.http)]
        command += ["--config", str(tmp_path / "gateway.yaml")]
        command += ["--metrics-port", str(ports.metrics)]
        # uvicorn prefers this package if it can be imported, but its parser bounds no headers. The
        # gateway must not use it; an empty module would answer no request.
        (tmp_path / "httptools.py").touch()
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            speak_until_the_end(process, number, ports, model, voice)
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "log").read_text()
    assert "Shutting down" in text
    assert "Traceback" not in text
    assert KEY not in text
    assert "three" not in text


def speak_until_the_end(
    process: subprocess.Popen[bytes],
    number: signal.Signals,
    ports: Ports,
    model: Token2Wav,
    voice: ClientVoice,
) -> None:
    """Speaks over HTTP and a WebSocket, ends the gateway meanwhile, and checks all audio."""
    url, key = f"http://127.0.0.1:{ports.http}", {"authorization": f"Bearer {KEY}"}
    stream = f"ws://127.0.0.1:{ports.http}/v1/audio/speech/stream"
    body = {"model": "tts-1", "voice": VOICE, "input": TEXT, "response_format": "pcm"}
    until(lambda: answers(f"{url}/health/live") or process.poll() is not None)
    http_audio: list[bytes] = []
    with (
        httpx.Client(base_url=url, headers=key, timeout=PATIENCE_SECONDS) as http,
        connect(stream, additional_headers=key) as ws,
    ):
        ws.send(json.dumps({"voice": VOICE, "stream_audio": True}))
        ws.send(json.dumps({"type": "input.text", "text": f"{TEXT}\n{TEXT}\n"}))

        def speak() -> None:
            http_audio.append(http.post("/v1/audio/speech", json=body).content)

        during = threading.Thread(target=speak)
        during.start()
        metrics = f"http://127.0.0.1:{ports.metrics}/metrics"
        until(lambda: "token2wav_gateway_speaking 2.0" in httpx.get(metrics).text)
        process.send_signal(number)
        messages = list(ws)  # until the gateway closes the socket
        during.join()
        assert ws.close_code == 1001
    whole = expected(model, voice, TEXT)
    assert_same(http_audio[0], whole)
    audio = b"".join(message for message in messages if isinstance(message, bytes))
    half = len(audio) // 2
    assert_same(audio[:half], whole)
    assert_same(audio[half:], whole)
    assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: "),
        (["--metrics-port", "PORT"], "metrics port PORT: "),
    ],
)
def test_a_command_that_cannot_start_says_why(arguments: list[str], reason: str) -> None:
    with serving(language_model.create_app(tokens_of, PACE)) as port:
        taken = [part.replace("PORT", str(port)) for part in arguments]
        # In its own process, because the command limits the log of its process: in the process of
        # the tests, those that run later would miss lines.
        command = [sys.executable, "-m", "token2wav", "gateway", *taken]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"token2wav gateway: {reason.replace('PORT', str(port))}")
    assert done.stderr.count("\n") == 1
