"""Commands: their versions, and the one line for wrong usage or for a missing extra."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from tests.support.golden import DATA
from tests.support.patience import PATIENCE_SECONDS
from tests.support.tables import table
from token2wav_export import cli as export
from token2wav_server import cli as serve
from token2wav_server import plan
from token2wav_voice import cli as voice

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "token2wav-serve": serve.main,
    "token2wav-plan": plan.main,
    "token2wav-tokenize": voice.tokenize,
    "token2wav-voice": voice.main,
    "token2wav-export": export.main,
}
WRONG_USAGE = table(
    """
token2wav-serve | --http-port 0 | '0' is not a port, which is a number from 1
token2wav-serve | --grpc-port 65536 | '65536' is not a port
token2wav-serve | --metrics-port -1 | '-1' is not a port
token2wav-serve | --http-port http | 'http' is not a port
token2wav-serve | --grace-seconds=-1 | of at least 0
token2wav-serve | --canary-seconds often | of at least 0
token2wav-serve | --notice-seconds 1s | of at least 0
token2wav-plan | "" | one of the arguments --gpu --memory-mib is required
token2wav-tokenize | "" | arguments are required: --wav
token2wav-voice create | "" | arguments are required: --wav, --out
token2wav-export onnx | --opset 1 | invalid choice: 1
token2wav-export onnx | --opset 23 | invalid choice: 23
token2wav-export onnx | --graphs other | 'other'
token2wav-export onnx | --precision int8 | 'int8'
token2wav-export tensorrt | --package other | 'other'
token2wav-export tensorrt | --max-streams 0 | '0'
token2wav-export tensorrt | --history-seconds nan | 'nan'
token2wav-export verify | --seconds 0 | '0'
"""
)


@pytest.mark.parametrize(("program", "options", "message"), WRONG_USAGE)
def test_wrong_usage_is_one_line_that_points_at_the_help(
    program: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *subcommand = program.split()
    with pytest.raises(SystemExit) as stop:
        COMMANDS[command]([*subcommand, "--model=.", *options.split()])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program}: error: ")
    assert message in line
    assert line.endswith(f" (see {program} --help)")


SCRIPTS = entry_points(group="console_scripts").select(module="token2wav.commands")


def test_every_command_has_an_entry_point() -> None:
    assert {script.name for script in SCRIPTS} == {
        *COMMANDS,
        "token2wav-client",
        "token2wav-gateway",
    }


@pytest.mark.parametrize("command", sorted(SCRIPTS.names))
def test_every_command_prints_its_version(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--version"])
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[command].load()()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"{command} {version('token2wav')}\n"


MISSING = table(
    """
token2wav-client | client | --help | soundfile | client
token2wav-gateway | gateway | --help | fastapi | gateway
token2wav-serve | serve | --help | aiohttp | server
token2wav-plan | plan | --help | torch | server
token2wav-voice | voice | --help | kaldi_native_fbank | voice
token2wav-tokenize | tokenize | --help | onnxruntime | voice
token2wav-export | export | onnx --model {tiny} --out {out} | onnx | export
"""
)


@pytest.mark.parametrize(("command", "function", "arguments", "module", "extra"), MISSING)
def test_a_command_names_its_missing_extra(
    command: str, function: str, arguments: str, module: str, extra: str, tmp_path: Path
) -> None:
    words = arguments.format(tiny=DATA / "tiny", out=tmp_path).split()
    done = run_without(module, f"from token2wav.commands import {function} as run", words)
    assert done.stderr == (
        f"{command}: error: the module {module} is missing; run: pip install 'token2wav[{extra}]'\n"
    )
    assert done.returncode == 2


def test_the_check_of_a_model_names_a_missing_extra() -> None:
    """The check is a process of its own, because the launcher does not import torch."""
    done = run_without(
        "torch", "from token2wav_server.check import main as run", [str(DATA / "tiny")]
    )
    assert done.stdout == "the module torch is missing; run: pip install 'token2wav[server]'\n"
    assert (done.returncode, done.stderr) == (1, "")


def run_without(
    module: str, statement: str, arguments: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs the function `run` of a statement in a process in which a module cannot be imported."""
    code = f"import sys; sys.modules[{module!r}] = None; {statement}; sys.exit(run())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
