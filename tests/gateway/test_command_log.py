"""Log of the command: no text, no key and no password, whatever the level of the root logger."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml
from safetensors.numpy import save_file
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import TEMPLATE, VOICE, key_settings
from testkit.rigs.raw_server import EVENTS_HEAD, raw_server, sends
from token2wav_client import ClientVoice
from token2wav_client.voice import FIELDS
from token2wav_server import Ports

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
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


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


@pytest.mark.parametrize("module", [["-m", "token2wav", "gateway"], ["-c", AT_DEBUG]])
def test_no_words_and_no_keys_in_the_log(
    rig: DoorServer, voice: ClientVoice, tmp_path: Path, module: list[str]
) -> None:
    folder = tmp_path / "voices"
    folder.mkdir()
    tensors = {name: getattr(voice, name) for name in FIELDS}
    save_file(tensors, folder / f"{VOICE}.safetensors")
    port = Ports.free().http
    with raw_server(sends(EVENTS_HEAD + ANSWER.encode())) as model:
        settings = {
            "language_model": {
                "url": f"http://127.0.0.1:{model}/v1",
                "template": TEMPLATE,
                "api_key": MODEL_KEY,
            },
            "speech_server": {"url": rig.server.grpc_url, "response_timeout_s": PATIENCE_SECONDS},
            "voices": {"folder": str(folder)},
            "keys": [key_settings("shop", KEY)],
        }
        (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, *module, "--port", str(port)]
        command += ["--config", str(tmp_path / "gateway.yaml")]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(url) or process.poll() is not None)
            use(url)
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "log").read_text()
    assert "a text failed: language model: error" in text
    assert ("DEBUG" in text) == (module[0] == "-c")
    assert [secret for secret in SECRETS if secret in text] == []
