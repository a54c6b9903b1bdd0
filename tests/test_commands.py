"""Wrong usage of the commands, each of which has one line for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
