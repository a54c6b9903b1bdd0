"""`token2wav up`: a typed sentence becomes speech, and the end of one part ends the others."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import soundfile

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.network import needs_ipv6
from testkit.rigs.processes import children, command_line, descendants, finished, suspend
from token2wav_server import Ports, demo, up

UP = [str(Path(sys.executable).with_name("token2wav")), "up"]


def test_a_sentence_is_spoken_until_a_part_ends(tmp_path: Path) -> None:
    port = Ports.free().http
    with subprocess.Popen(
        [*UP, f"--port={port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        while not (line := running.stdout.readline()).startswith("token2wav up: ready"):
            assert running.poll() is None
        assert f"http://127.0.0.1:{port}/" in line
        parts = children(running.pid)
        spoken = httpx.post(
            f"http://127.0.0.1:{port}/v1/audio/speech",
            json={"input": "Good morning, and welcome.", "response_format": "wav"},
            timeout=PATIENCE_SECONDS,
        )
        os.kill(_gateway(parts), signal.SIGKILL)
        errors = running.stderr.read()
    assert len(parts) == 3
    assert not any(Path(f"/proc/{part}").exists() for part in parts)
    audio, rate = soundfile.read(io.BytesIO(spoken.content), dtype="float32")
    assert rate == 24_000
    assert 1.0 < len(audio) / rate < 5.0
    assert audio.std() > 0.01
    assert running.returncode == 3
    assert errors.splitlines()[-1] == (
        "token2wav up: error: the gateway has ended with status -9; everything else is stopped"
    )


@needs_ipv6
def test_a_killed_command_ends_its_parts_after_it_said_what_is_not_ready(tmp_path: Path) -> None:
    port = Ports.free().http
    settings = {
        "language_model": {"url": f"http://127.0.0.1:{Ports.free().http}/v1"},
        "speech_server": {"response_timeout_s": 12},
    }
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps(settings))
    with subprocess.Popen(
        [*UP, demo.MODEL, "--config", config, "--host", "::1", f"--port={port}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as running:
        assert running.stdout is not None
        while "not ready yet: language model" not in running.stdout.readline():
            assert running.poll() is None
        gateway = _gateway(children(running.pid))
        descriptor = command_line(gateway).split(b"\0/dev/fd/")[1].split(b"\0")[0].decode()
        merged = json.loads(Path(f"/proc/{gateway}/fd/{descriptor}").read_text())
        processes = descendants(running.pid)
        running.kill()
        until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    assert merged["speech_server"]["response_timeout_s"] == 12


def test_ctrl_c_ends_all_parts_and_a_second_one_kills_a_part_that_hangs(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*UP, f"--port={Ports.free().http}"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as running:
        assert running.stdout is not None
        while not running.stdout.readline().startswith("token2wav up: ready"):
            assert running.poll() is None
        processes = descendants(running.pid)
        gateway = _gateway(processes)
        suspend(gateway)
        running.send_signal(signal.SIGINT)
        until(lambda: signal.SIGTERM in _pending(gateway))
        running.send_signal(signal.SIGINT)
        assert running.wait(up._END_S / 2) == 0
        until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


def _gateway(processes: list[int]) -> int:
    [gateway] = [process for process in processes if b"\0gateway\0" in command_line(process)]
    return gateway


def _pending(process: int) -> set[int]:
    """Returns the numbers of the signals that wait for a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")]
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.parametrize(
    ("options", "content", "status", "message"),
    [
        (["--config", "c.yaml"], "language_model:", 2, "c.yaml: language_model: "),
        (["--config", "c.yaml"], "- voices", 2, "c.yaml: document: "),
        (["--config", "c.yaml"], "speech_server: {port: 1}", 2, "c.yaml: speech_server: unknown"),
        (["--voices", "c.yaml"], "", 2, "--voices: voices.folder: c.yaml is no folder"),
        (
            ["--voices", "c.yaml", "--config", "c.yaml"],
            "log_level: info",
            2,
            "--voices: voices.folder: c.yaml is no folder",
        ),
        (
            ["--config", "c.yaml"],
            "voices: {folder: c.yaml}",
            2,
            "error: c.yaml: voices.folder: c.yaml is no folder",
        ),
        (
            ["--config", "c.yaml"],
            "voices: {model: c.yaml}",
            2,
            "error: c.yaml: voices.model: c.yaml is no folder",
        ),
        (["--host", "192.0.2.1"], "", 2, "--host 192.0.2.1: not an address that this machine"),
        (["model"], "", 2, "model needs a language model: add --language-model URL"),
        (["--port", "{taken}"], "", 3, "gateway port {taken} on 127.0.0.1 cannot be used"),
        (["--port", "{taken}"], "", 3, "or choose another with --port\n"),
        (["--riva-port", "{taken}"], "", 3, "or choose another with --riva-port\n"),
    ],
)
def test_an_option_that_cannot_work_is_named_before_a_part_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    content: str,
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(content)
    free = ["--port", str(Ports.free().http)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [word.replace("{taken}", port) for word in options]
        assert up.main([*free, *words]) == status
    errors = capsys.readouterr().err
    assert message.replace("{taken}", port) in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("option", ["--port", "--riva-port"])
def test_a_port_that_does_not_exist_is_a_wrong_option(option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        up.main([option, "99999"])


def test_an_installation_without_the_demo_voice_needs_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "PROMPT", Path("missing.wav"))
    assert up.main([]) == 2
    assert (
        "the demo voice is not part of this installation; name a MODEL" in capsys.readouterr().err
    )


def test_ctrl_c_interrupts_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "model_folder", lambda model: signal.raise_signal(signal.SIGINT))
    url, port = "http://localhost:9000/v1", str(Ports.free().http)
    assert up.main(["org/name", "--language-model", url, "--port", port]) == 130


def test_a_language_model_that_does_not_answer_is_named(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{Ports.free().http}/v1"
    arguments = ["--language-model", url, f"--port={Ports.free().http}"]
    ended = finished(*UP, *arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert f"--language-model: {url}/models has no answer" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
