"""Errors of commands: the user sees one sentence and a non-zero exit, and no code is executed."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import DATA, TINY
from tests.support.patience import PATIENCE_SECONDS
from tests.support.serve_command import command
from token2wav_export import cli as export_commands
from token2wav_server import plan
from token2wav_server.cli import main
from token2wav_server.launcher.ports import Ports
from token2wav_voice import cli as voice_commands

CLIENT_UNAVAILABLE, SERVE_USAGE = 3, 2
Completed = subprocess.CompletedProcess[str]
Serve = Callable[..., Completed]


@pytest.fixture
def serve(capsys: pytest.CaptureFixture[str]) -> Iterator[Serve]:
    """Runs the command in this process, whose signals it takes over: one of its own would import
    torch, for seconds.
    """

    def run(model: Path, *arguments: str) -> Completed:
        capsys.readouterr()
        status = main(command(model, Ports.free())[1:] + list(arguments))
        return Completed(arguments, status, *capsys.readouterr())

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def synth(url: str, out: Path) -> Completed:
    synthesis = [sys.executable, "-m", "token2wav_client", "synth", "--url", url, "--out", str(out)]
    synthesis += [
        "--tokens",
        str(DATA / "demo" / "tokens.npy"),
        "--voice",
        str(DATA / "demo" / "voice.safetensors"),
    ]
    return as_a_process(synthesis)


def as_a_process(arguments: list[str]) -> Completed:
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def one_sentence(completed: Completed, program: str) -> str:
    lines = completed.stderr.strip().splitlines()
    assert len(lines) == 1, completed.stderr
    assert lines[0].startswith(f"{program}: error: ")
    return lines[0]


class _TouchesAFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


WRONG_USAGE: dict[str, tuple[Callable[[list[str]], int], list[str], str]] = {
    "token2wav-serve": (
        main,
        ["--model", ".", "--http-port", "0"],
        "'0' is not a port, which is a number from 1",
    ),
    "token2wav-plan": (
        plan.main,
        ["--model", "."],
        "one of the arguments --gpu --memory-mib is required",
    ),
    "token2wav-tokenize": (
        voice_commands.tokenize,
        ["--model", "."],
        "arguments are required: --wav",
    ),
    "token2wav-voice create": (
        voice_commands.main,
        ["create", "--model", "."],
        "arguments are required: --wav, --out",
    ),
    "token2wav-export onnx": (
        export_commands.main,
        ["onnx", "--model", ".", "--opset", "1"],
        "invalid choice: 1",
    ),
}


@pytest.mark.parametrize("program", WRONG_USAGE)
def test_wrong_usage_is_one_line_that_points_at_the_help(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, arguments, message = WRONG_USAGE[program]
    with pytest.raises(SystemExit) as stop:
        run(arguments)
    assert stop.value.code == SERVE_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program}: error: ")
    assert message in line
    assert line.endswith(f" (see {program} --help)")


def test_no_such_model_folder(tmp_path: Path, serve: Serve) -> None:
    completed = serve(tmp_path / "nowhere")
    assert completed.returncode == SERVE_USAGE
    assert "nowhere: no such model folder" in one_sentence(completed, "token2wav-serve")


def test_half_a_model_folder(folder: Path, serve: Serve) -> None:
    (folder / "hift.safetensors").unlink()
    completed = serve(folder)
    assert completed.returncode == SERVE_USAGE
    assert "neither hift.safetensors nor hift.pt is there" in one_sentence(
        completed, "token2wav-serve"
    )


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!new:os.mkdir"])
def test_yaml_that_tries_to_run_code(folder: Path, tmp_path: Path, serve: Serve, tag: str) -> None:
    text = (folder / "cosyvoice3.yaml").read_text()
    start = text.index("flow: !new:")
    (folder / "cosyvoice3.yaml").write_text(text[:start] + f"flow: {tag} ['{tmp_path}/executed']\n")
    completed = serve(folder)
    assert completed.returncode == SERVE_USAGE
    assert "cosyvoice3.yaml" in one_sentence(completed, "token2wav-serve")
    assert not (tmp_path / "executed").exists()


def test_pickle_with_code_in_it(folder: Path, tmp_path: Path) -> None:
    (folder / "flow.safetensors").unlink()
    (folder / "flow.pt").write_bytes(
        pickle.dumps({"input_embedding.weight": _TouchesAFile(tmp_path / "executed")})
    )
    completed = as_a_process(command(folder, Ports.free()))
    assert completed.returncode == SERVE_USAGE
    assert "refused, nothing was executed" in one_sentence(completed, "token2wav-serve")
    assert not (tmp_path / "executed").exists()


def test_unknown_key_in_the_server_configuration(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "server.yaml").write_text("limits: {strems: 3}")
    completed = serve(TINY, "--config", str(tmp_path / "server.yaml"))
    assert completed.returncode == SERVE_USAGE
    assert "limits: unknown key 'strems'" in one_sentence(completed, "token2wav-serve")


def test_a_voice_in_the_server_configuration_that_is_not_there(
    tmp_path: Path, serve: Serve
) -> None:
    (tmp_path / "server.yaml").write_text("voices: [anna.safetensors]")
    completed = serve(TINY, "--config", str(tmp_path / "server.yaml"))
    assert completed.returncode == SERVE_USAGE
    said = one_sentence(completed, "token2wav-serve")
    assert f"voices: {tmp_path}/anna.safetensors: cannot be read as a voice (No such file" in said


def test_server_is_down(tmp_path: Path) -> None:
    completed = synth(f"127.0.0.1:{Ports.free().grpc}", tmp_path / "out.wav")
    assert completed.returncode == CLIENT_UNAVAILABLE
    one_sentence(completed, "token2wav-client")
    assert not (tmp_path / "out.wav").exists()
