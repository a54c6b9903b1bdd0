"""Command `token2wav`: its subcommands, and the one line for wrong usage or a missing extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from testkit.models.golden import DATA
from testkit.rigs.processes import finished
from testkit.tables import table
from token2wav.commands import main

WRONG_USAGE = table(
    """
serve | --http-port 0 | '0' is not a port, which is a number from 1
serve | --grpc-port 65536 | '65536' is not a port
serve | --metrics-port -1 | '-1' is not a port
serve | --http-port http | 'http' is not a port
serve | --grace-seconds=-1 | of at least 0
serve | --canary-seconds often | of at least 0
serve | --notice-seconds 1s | of at least 0
plan | "" | one of the arguments --gpu --memory-mib is required
tokenize | "" | arguments are required: --wav
tokenize | --wav w --start -1 | --start: '-1' is not a number of at least 0
tokenize | --wav w --start soon | --start: 'soon' is not a number
tokenize | --wav w --end nan | --end: 'nan' is not a number
tokenize | --wav w --out | --out: expected one argument
synth | "" | arguments are required: --tokens
synth | --tokens t --voice v | one of the arguments --out --play is required
synth | --tokens t --out o --voice-id i --voice v | --voice: not allowed with argument --voice-id
synth | --tokens t --out o --voice-id i --voice-name n | --voice-name: not allowed with argument
synth | --tokens t --out o --rate -1 | --rate: '-1' is not a number of at least 0
synth | --tokens t --out o --rate nan | --rate: 'nan' is not a number of at least 0
synth | --tokens t --out o --tokens-per-request 0 | '0' is not an integer of at least 1
synth | --tokens t --out o --end-after-repeats -1 | '-1' is not an integer of at least 0
synth | --tokens t --out o --end-after-silence nan | 'nan' is not a number of at least 0
synth | --tokens t --out o --timeout 0 | '0' is not a number above 0
synth | --tokens t --out o --audio-format mp3 | invalid choice: 'mp3'
synth | --tokens t --out o --format mp3 | invalid choice: 'mp3'
bench | --streams 0 | '0' is not an integer of at least 1
bench | --rounds 1.5 | '1.5' is not an integer of at least 1
bench | --row-seconds 0 | '0' is not a number above 0
bench | --voice a.npz --voice-id b | not allowed with argument
voice create | "" | arguments are required: --wav, --out
export onnx | --opset 1 | argument --opset: invalid choice
export onnx | --opset 23 | argument --opset: invalid choice
export onnx | --graphs other | 'other'
export onnx | --precision int8 | 'int8'
export tensorrt | --package other | 'other'
export tensorrt | --max-streams 0 | '0'
export tensorrt | --history-seconds nan | 'nan'
export verify | --seconds 0 | '0'
"""
)


@pytest.mark.parametrize(("program", "options", "message"), WRONG_USAGE)
def test_wrong_usage_is_one_line_that_points_at_the_help(
    program: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["."] if program == "serve" else ["--model=."]
    with pytest.raises(SystemExit) as stop:
        main([*program.split(), *model, *options.split()])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"token2wav {program}: error: ")
    assert message in line
    assert line.endswith(f" (see token2wav {program} --help)")


@pytest.mark.parametrize(("words", "message"), [([], "are required"), (["sing"], "'sing'")])
def test_a_subcommand_is_needed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("token2wav: error: ")
    assert message in line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"token2wav {version('token2wav')}\n"


LIGHT = [
    *("synth", "health", "voice-id", "perf-data", "voice", "tokenize", "gateway", "serve"),
    *("bench", "doctor", "models", "pull", "setup"),
]


@pytest.mark.parametrize("name", LIGHT)
def test_torch_is_not_imported(name: str) -> None:
    done = run_without("torch", [name, "--help"])
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_of_subcommands_and_options(tmp_path: Path) -> None:
    """bash itself completes with the script, as at a terminal."""
    script = tmp_path / "completion.sh"
    done = run_without("kaldi_native_fbank", ["completion", "bash"])
    assert (done.returncode, done.stderr) == (0, "")
    script.write_text(done.stdout)
    for words, expected in (
        ("token2wav he", {"health"}),
        ("token2wav synth --voice-", {"--voice-id", "--voice-name"}),
        ("token2wav export ins", {"inspect"}),
        ("token2wav voice", {"voice", "voice-id"}),  # by name, although its extra is missing
    ):
        count = len(words.split()) - 1
        shell = (
            f"source {script}; COMP_WORDS=({words}) COMP_CWORD={count}; "
            "_shtab_token2wav; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        reply = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        assert set(reply.stdout.split()) == expected


MISSING = table(
    """
synth --help | soundfile | client
gateway --help | fastapi | gateway
serve --help | aiohttp | server
plan --help | torch | server
voice --help | kaldi_native_fbank | voice
tokenize --help | onnxruntime | voice
export onnx --model {tiny} --out {out} | onnx | export
"""
)


@pytest.mark.parametrize(("arguments", "module", "extra"), MISSING)
def test_a_subcommand_names_its_missing_extra(
    arguments: str, module: str, extra: str, tmp_path: Path
) -> None:
    words = arguments.format(tiny=DATA / "tiny", out=tmp_path).split()
    done = run_without(module, words)
    assert done.stderr == (
        f"token2wav {words[0]}: error: the module {module} is missing; run: "
        f"pip install 'token2wav[{extra}]'\n"
    )
    assert done.returncode == 2


def test_the_check_of_a_model_names_a_missing_extra() -> None:
    """The check is a process of its own, because the launcher does not import torch."""
    done = run_without("torch", [str(DATA / "tiny")], "from token2wav_server.check import main")
    assert done.stdout == "the module torch is missing; run: pip install 'token2wav[server]'\n"
    assert (done.returncode, done.stderr) == (1, "")


def run_without(
    module: str, arguments: list[str], statement: str = "from token2wav.commands import main"
) -> subprocess.CompletedProcess[str]:
    """Runs the function `main` of a statement in a process in which a module is missing."""
    code = f"import sys; sys.modules[{module!r}] = None; {statement}; sys.exit(main())"
    return finished(sys.executable, "-c", code, *arguments)
