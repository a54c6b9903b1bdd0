"""`token2wav up`: a typed sentence becomes speech, and the end of one part ends the others."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import soundfile

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.processes import children, command_line
from token2wav_server import Ports

UP = [str(Path(sys.executable).with_name("token2wav")), "up"]


@pytest.mark.parametrize("end", ["ctrl-c", "death"])
def test_a_sentence_is_spoken_until_a_part_ends(tmp_path: Path, end: str) -> None:
    port = Ports.free().http
    with subprocess.Popen(
        [*UP, f"--port={port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as up:
        assert up.stdout is not None
        assert up.stderr is not None
        while not (line := up.stdout.readline()).startswith("token2wav up: ready"):
            assert up.poll() is None
        assert f"http://127.0.0.1:{port}/" in line
        parts = children(up.pid)
        spoken = httpx.post(
            f"http://127.0.0.1:{port}/v1/audio/speech",
            json={"input": "Good morning, and welcome.", "response_format": "wav"},
            timeout=PATIENCE_SECONDS,
        )
        if end == "ctrl-c":
            up.send_signal(signal.SIGINT)
        else:
            [gateway] = [part for part in parts if b"\0gateway\0" in command_line(part)]
            os.kill(gateway, signal.SIGKILL)
        errors = up.stderr.read()
    assert len(parts) == 3
    assert not any(Path(f"/proc/{part}").exists() for part in parts)
    audio, rate = soundfile.read(io.BytesIO(spoken.content), dtype="float32")
    assert rate == 24_000
    assert 1.0 < len(audio) / rate < 5.0
    assert audio.std() > 0.01
    if end == "ctrl-c":
        assert up.returncode == 0
    else:
        assert up.returncode == 3
        last = errors.splitlines()[-1]
        assert last == (
            "token2wav up: error: the gateway has ended with status -9; everything else is stopped"
        )


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = subprocess.run(
            [*UP, f"--port={port}"], capture_output=True, text=True, cwd=tmp_path, check=False
        )
    assert up.returncode == 3
    assert f"port {port}" in up.stderr
    assert len(up.stderr.splitlines()) == 1


def test_a_language_model_that_does_not_answer_is_named(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{Ports.free().http}/v1"
    up = subprocess.run(
        [*UP, "--language-model", url], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert up.returncode == 2
    assert f"--language-model: {url}/models has no answer" in up.stderr
    assert len(up.stderr.splitlines()) == 1
