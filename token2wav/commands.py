"""Command `token2wav`: its subcommands, each with the module that runs it and the extra it needs.

The wheel always installs the command, but the dependencies of a subcommand only with its extra. So
the module of a subcommand is imported only when the subcommand runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

PROGRAM = "token2wav"


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's arguments. An error is one line that names `--help`, without the usage.

    Parsers of subcommands have the same class.
    """

    def error(self, message: str) -> NoReturn:
        """Prints the error, and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


@dataclass(frozen=True)
class Command:
    """Subcommand of `token2wav`.

    Attributes:
        module: module that is imported when the subcommand runs.
        extra: extra of the wheel that installs the dependencies of the module.
        summary: one line for the help text of `token2wav`.
        function: function of the module that runs the subcommand. It takes the arguments after the
            name of the subcommand, and returns the exit code.
    """

    module: str
    extra: str
    summary: str
    function: str = "main"

    @property
    def parser(self) -> str:
        """Function of the module that returns the parser of the arguments."""
        return "parser" if self.function == "main" else f"{self.function}_parser"

    def load(self, function: str) -> Callable[..., Any]:
        loaded: Callable[..., Any] = getattr(import_module(self.module), function)
        return loaded


COMMANDS = {
    "serve": Command("token2wav_server.cli", "server", "serve a model with NVIDIA Triton"),
    "pull": Command("token2wav.commands", "hub", "fetch a model from the Hugging Face Hub", "pull"),
    "models": Command(
        "token2wav.commands",
        "client",  # it needs no package
        "list the models that have a name",
        "models",
    ),
    "doctor": Command("token2wav_server.doctor", "server", "check this machine, and a model"),
    "setup": Command("token2wav_server.setup", "server", "install tritonserver with pip"),
    "synth": Command(
        "token2wav_client.cli",
        "client",
        "synthesize one utterance into a file, a pipe or a loudspeaker",
        "synth",
    ),
    "health": Command(
        "token2wav_client.cli", "client", "check that a server synthesizes speech", "health"
    ),
    "bench": Command(
        "token2wav_client.cli",
        "client",
        "measure latency and throughput of a running server",
        "bench",
    ),
    "voice": Command("token2wav_voice.cli", "voice", "create a voice from a recording"),
    "voice-id": Command(
        "token2wav_client.cli", "client", "print the id of a voice file", "voice_id"
    ),
    "tokenize": Command(
        "token2wav_voice.cli", "voice", "turn a recording into speech tokens", "tokenize"
    ),
    "gateway": Command(
        "token2wav_gateway.cli", "gateway", "serve text to speech with OpenAI's interfaces"
    ),
    "up": Command("token2wav_server.up", "up", "start a server and a gateway, and speak text"),
    "export": Command("token2wav_export.cli", "export", "export ONNX graphs and TensorRT engines"),
    "plan": Command("token2wav_server.plan", "server", "compute how many streams a GPU can serve"),
    "perf-data": Command(
        "token2wav_client.cli",
        "client",
        "write an utterance as input data for perf_analyzer",
        "perf_data",
    ),
    "completion": Command(
        "token2wav.commands",
        "client",  # its only dependency, shtab, is always installed
        "print a completion script for a shell",
        "completion",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand, and returns its exit code: 2 if its extra is not installed. `arguments`
    are the name of the subcommand and its arguments; by default ``sys.argv[1:]``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        _parser().parse_args(words)  # prints help, version or an error, and exits
    name, *rest = words
    command = COMMANDS[name]
    try:
        return int(command.load(command.function)(rest))
    except ModuleNotFoundError as error:
        print(f"{PROGRAM} {name}: error: {missing(error, command.extra)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a list, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def missing(error: ModuleNotFoundError, extra: str) -> str:
    """Returns the message about a missing module, which names the extra to install. Raises the
    error if the module is one of our own, which no extra installs.
    """
    name = (error.name or "").partition(".")[0]
    if name.startswith("token2wav"):
        raise error
    return f"the module {name} is missing; run: pip install 'token2wav[{extra}]'"


def pull(arguments: Sequence[str]) -> int:
    """Fetches a model and prints its folder. Returns the exit code: 2 if this is not possible."""
    from token2wav.errors import ConfigError, Token2WavError
    from token2wav.hub import model_folder
    from token2wav.known_models import suggestion

    options = pull_parser().parse_args(arguments)
    try:
        folder = model_folder(options.model, "front_end" if options.front_end else "decoder")
        if not folder.is_dir():
            hint = suggestion(options.model)
            raise ConfigError(f"{options.model}: neither a folder nor a name of a model{hint}")
    except Token2WavError as error:
        print(f"{PROGRAM} pull: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM} pull: interrupted; run it again to go on", file=sys.stderr)
        return 130
    print(folder)
    return 0


def pull_parser() -> CommandParser:
    parser = CommandParser(
        prog=f"{PROGRAM} pull",
        description="Fetch the files of a model that its decoder needs from the Hugging Face Hub, "
        "and print the folder. The variables of the package huggingface_hub apply, such as HF_HOME "
        "(cache), HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.",
    )
    parser.add_argument("model", metavar="MODEL", help="org/name, org/name@revision, or an alias")
    parser.add_argument(
        "--front-end",
        action="store_true",
        help="fetch the files that make voices and tokens from recordings instead",
    )
    return parser


def models(arguments: Sequence[str]) -> int:
    """Prints the names that are known, and returns the exit code 0."""
    from token2wav.known_models import NOTE, facts, known_models, table

    if models_parser().parse_args(arguments).json:
        print(json.dumps([facts(model) for model in known_models()], indent=1), flush=True)
        return 0
    lines = list(table())
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(f"\n{NOTE}", flush=True)
    return 0


def models_parser() -> CommandParser:
    parser = CommandParser(
        prog=f"{PROGRAM} models",
        description="List the models on the Hugging Face Hub that this project reads. In all "
        "commands a name stands for a model folder. Another repository with the same files works "
        "too, as org/name.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    return parser


def completion(arguments: Sequence[str]) -> int:
    """Prints a script by which a shell completes subcommands and options."""
    import shtab

    shell = completion_parser().parse_args(arguments).shell
    program = _parser()
    (subcommands,) = (
        action for action in program._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, command in COMMANDS.items():
        try:
            subcommands.choices[name] = command.load(command.parser)()
        except ModuleNotFoundError as error:  # only the name of this subcommand is completed
            missing(error, command.extra)
    _complete_paths(program, {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY})
    print(shtab.complete(program, shell))
    return 0


def completion_parser() -> CommandParser:
    parser = CommandParser(
        prog=f"{PROGRAM} completion",
        description="Print a script by which a shell completes subcommands and options. For bash, "
        'add this line to ~/.bashrc: eval "$(token2wav completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _complete_paths(parser: argparse.ArgumentParser, kinds: dict[str, object]) -> None:
    """Marks the options whose values are paths, by their metavar, also of subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_paths(subparser, kinds)
        elif action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=PROGRAM,
        description="Turn streams of speech tokens into streams of audio.",
        epilog=f"`{PROGRAM} COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version(PROGRAM)}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subcommands.add_parser(name, help=command.summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
