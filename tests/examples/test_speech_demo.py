"""`make speech`: a typed sentence becomes speech through the language model of the demo."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import soundfile

from testkit.models.golden import ROOT
from testkit.patience import PATIENCE_SECONDS
from token2wav_server import Ports


def test_a_sentence_is_spoken(tmp_path: Path) -> None:
    ports = Ports.free()
    command = [sys.executable, "-m", "examples.speech.demo", f"--port={ports.http}"]
    command += [f"--voices={tmp_path}"]
    command += [f"--language-model-port={ports.grpc}", "--tokens-per-second=1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as demo:
        try:
            assert demo.stdout is not None
            while not demo.stdout.readline().startswith("speech: ready"):
                assert demo.poll() is None
            with httpx.Client(
                base_url=f"http://127.0.0.1:{ports.http}", timeout=PATIENCE_SECONDS
            ) as http:
                spoken = http.post(
                    "/v1/audio/speech",
                    json={
                        "model": "token2wav",
                        "voice": "joe",
                        "input": "Good morning, and welcome.",
                        "response_format": "wav",
                    },
                )
        finally:
            demo.terminate()
    audio, rate = soundfile.read(io.BytesIO(spoken.content), dtype="float32")
    assert rate == 24_000
    assert 1.0 < len(audio) / rate < 5.0
    assert audio.std() > 0.01


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "examples.speech.demo", f"--port={port}"]
        demo = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert demo.returncode == 1
    assert (
        demo.stderr
        == f"speech: port {port}: Address already in use; choose another one with --port\n"
    )
