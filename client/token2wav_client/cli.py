"""Command line of `token2wav-client`: parses arguments, runs a command, sets the exit code."""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from token2wav_client import __version__
from token2wav_client.arguments import CommandParser
from token2wav_client.audio import AUDIO_FORMATS, AudioFormat
from token2wav_client.commands import TOKEN_VARIABLE, health, perf_data, synth, voice_id
from token2wav_client.errors import EXIT_CODES, ClientError
from token2wav_client.writer import FILE_FORMATS

PROGRAM = "token2wav-client"

_DEFINITIONS = """\
times in the report:
  arrival   seconds since the first tokens were sent
  latency   seconds since the request was sent that made the chunk possible: the later \
of the one with the
            last token heard in the chunk and the one that the server says it answers
  gap       seconds since the previous chunk
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code, one of `EXIT_CODES`."""
    options = _parser().parse_args(arguments)
    # Warnings report retries and text that the token parser skipped.
    logging.basicConfig(format=f"{PROGRAM}: %(message)s", stream=sys.stderr)
    try:
        with _terminable():
            return int(options.run(options))
    except ClientError as error:
        return _give_up(f"error: {error}", error.exit_code)
    except _Terminated:
        return _give_up("terminated", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        return _give_up("interrupted", 128 + signal.SIGINT)


class _Terminated(KeyboardInterrupt):
    """Interrupt by SIGTERM, which stops a command in the same way as Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Context in which the first SIGTERM raises `_Terminated`, so that received audio is kept.

    A second SIGTERM ends the process.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _give_up(message: str, exit_code: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    exit_codes = "exit codes:\n" + "\n".join(
        f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items()
    )
    as_written = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(
        prog=PROGRAM,
        description="Turn speech tokens into audio on a token2wav server, while the "
        "tokens still arrive.",
        epilog=exit_codes,
        formatter_class=as_written,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        run: Callable[[argparse.Namespace], int], brief: str, description: str, epilog: str = ""
    ) -> Any:
        added = commands.add_parser(
            run.__name__.replace("_", "-"),
            help=brief,
            description=description,
            epilog=epilog,
            formatter_class=as_written,
        )
        added.set_defaults(run=run, refuse=added.error)
        return added

    speaking = command(
        synth,
        "speak one utterance into a file, a pipe or a loudspeaker",
        "Send tokens, write the audio as it arrives, and report how it arrived.",
        f"{_DEFINITIONS}\n{exit_codes}",
    )
    _add_utterance(speaking)
    _add_connection(speaking)
    naming = command(
        voice_id,
        "print the id of a voice file",
        "Print the id under which a server knows a voice once it was sent: the hash of its "
        "content.",
    )
    naming.add_argument("voice", metavar="FILE", help=".npz or .safetensors")
    measuring = command(
        perf_data,
        "write an utterance as input data for perf_analyzer",
        "Write an utterance and its voice as JSON for perf_analyzer's option --input-data.\n"
        "Each request that perf_analyzer makes of it is a whole utterance.",
    )
    _option(
        measuring,
        "--tokens FILE",
        ".npy, .json or text, as for synth; - for text from a pipe",
        required=True,
    )
    _option(measuring, "--voice FILE", ".npz or .safetensors", required=True)
    _option(measuring, "--out JSON", "file to write", required=True)
    seconds = "of audio: the tokens are cut, or repeated, to that length (default: all, once)"
    _option(measuring, "--seconds S", seconds, type=_SECONDS)
    checking = command(
        health,
        "find out whether the server works",
        "Speak three tokens with a voice that has no prompt, check the audio and say how long it "
        "took.\n"
        "Triton's own readiness is not enough: it stays when the process that runs the model has "
        "died.",
        exit_codes,
    )
    _add_audio_format(checking, "float32")
    _option(checking, "--timeout S", "seconds for all of it", 10, type=_SECONDS)
    _add_connection(checking)
    return parser


def _option(parser: Any, spelling: str, meaning: str, default: Any = None, **more: Any) -> None:
    """Adds an option to a parser.

    Args:
        parser: parser or group that receives the option.
        spelling: flag and metavar as the usage shows them, such as `--retry N`.
        meaning: help text, to which the default is appended.
        default: value if the option is absent.
        more: further arguments of `add_argument`.
    """
    flag, *metavar = spelling.split()
    told = "" if default is None else " (default: %(default)s)"
    if metavar:  # argparse rejects a metavar for a flag without a value
        more["metavar"] = metavar[0]
    parser.add_argument(flag, help=meaning + told, default=default, **more)


def _add_utterance(parser: argparse.ArgumentParser) -> None:
    option, count = partial(_option, parser), _number(int, 1)
    tokens = (
        ".npy or .json of integers, or text of <|s_123|> or integers; - for text "
        "from a pipe, sent as it comes"
    )
    option("--tokens FILE", tokens, required=True)
    option(
        "--codebooks N",
        "codes of each token in text; .npy and .json say it by their shape",
        1,
        type=count,
    )
    speaker = parser.add_mutually_exclusive_group(required=True)
    arrays = "prompt_tokens (P,), prompt_mel (2P, 80), speaker_embedding (192,)"
    _option(speaker, "--voice FILE", f".npz or .safetensors with {arrays}")
    _option(
        speaker,
        "--voice-id ID",
        "of a voice that the server was sent before (see the command voice-id)",
    )
    _option(speaker, "--voice-name NAME", "of a voice that the settings of the server name")
    endings = ", ".join(FILE_FORMATS)
    option(
        "--out FILE",
        f"mono file, ending in {endings}; - for standard output, and the report on standard error",
    )
    option(
        "--format",
        "of the file (default: what its name ends in; for standard output raw)",
        choices=FILE_FORMATS,
    )
    option("--play", "play the audio as it comes, with or without --out", action="store_true")
    pace = "send tokens at the pace of a language model, such as 25; 0 is as fast as they come"
    option("--rate TOKENS/S", pace, 0, type=_number(float))
    option(
        "--tokens-per-request N",
        "tokens in a request, at most; fewer if no more are there yet",
        5,
        type=count,
    )
    _add_audio_format(parser, "int16")
    option(
        "--sample-rate HZ",
        "8000, 16000, 22050, 24000, 44100 or 48000 (default: the model's own)",
        type=count,
    )
    option(
        "--steps N",
        "of the ODE, a number that the server allows: fewer are faster (default: its own)",
        type=count,
    )
    option("--json", "report as one JSON object instead of a table", action="store_true")
    option("--quiet", "no progress bar and no table", action="store_true")
    option(
        "--timeout S",
        "seconds of silence allowed while the server owes an answer",
        30,
        type=_SECONDS,
    )
    again = (
        "try again that often, after 0.5, 1, 2, then 4 s, when no server answers, or "
        "it is lost, silent or full; "
    )
    option("--retry N", f"{again}no audio comes twice", 0, type=_number(int))


def _add_audio_format(parser: argparse.ArgumentParser, default: AudioFormat) -> None:
    meaning = "of samples on the wire and in WAV and raw files; mulaw and alaw are G.711"
    _option(parser, "--audio-format", meaning, default, choices=AUDIO_FORMATS)


def _add_connection(parser: argparse.ArgumentParser) -> None:
    option = partial(_option, parser.add_argument_group("server"))
    option("--url HOST:PORT", "gRPC endpoint", "localhost:8001")
    option("--model NAME", "name of the model", "token2wav")
    option(
        "--connect-timeout S",
        "seconds in which the server must say that it is there",
        5,
        type=_SECONDS,
    )
    option(
        "--max-message-mib N", "MiB that a request or a response may have", 64, type=_number(int, 1)
    )
    access = parser.add_argument_group(
        "access", "any of --ca, --cert, --key and --server-name turns TLS on"
    )
    option = partial(_option, access)
    option("--tls", "encrypt; the server's certificate must be a trusted one", action="store_true")
    option("--ca FILE", "PEM of the authorities to trust, instead of the public ones")
    option("--cert FILE", "PEM of this client's certificate, for mutual TLS")
    option("--key FILE", "PEM of its private key")
    option("--server-name NAME", "in the server's certificate, if the address has another")
    bearer = f"a token, sent as authorization: Bearer; also from the variable {TOKEN_VARIABLE}. "
    option("--token-file FILE", f"{bearer}Only with TLS or to this machine")
    header = (
        "to send with every call; may be repeated. Others on this machine can see "
        "it in the process list"
    )
    option("--header NAME=VALUE", header, type=_header, action="append")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _number(
    kind: type[int] | type[float], least: int = 0, *, above: bool = False
) -> Callable[[str], float]:
    """Returns an argparse type that reads a finite number of at least, or above, `least`."""
    wanted = (
        f"{'an integer' if kind is int else 'a number'} "
        f"{'above' if above else 'of at least'} {least}"
    )

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


_SECONDS = _number(float, above=True)
