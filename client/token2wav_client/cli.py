"""Command line of `token2wav-client`: parses arguments, runs a command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from token2wav_client import __version__
from token2wav_client.audio import AUDIO_FORMATS
from token2wav_client.commands import TOKEN_VARIABLE, health, perf_data, synth, voice_id
from token2wav_client.errors import EXIT_CODES, ClientError
from token2wav_client.writer import FILE_FORMATS

PROGRAM = "token2wav-client"

_DEFINITIONS = """\
times in the report:
  arrival   seconds since the first tokens were sent
  latency   seconds since the request was sent that made the chunk possible: the later of the one with the
            last token heard in the chunk and the one that the server says it answers
  gap       seconds since the previous chunk
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code (one of `EXIT_CODES`)."""
    options = _parser().parse_args(arguments)
    # Warnings: what is tried again, and what of a text was skipped.
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
    """Interrupt by SIGTERM, which stops a command as Ctrl-C does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Context in which the first SIGTERM raises, so that received audio is kept; a second one ends the process."""

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
    exit_codes = "exit codes:\n" + "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Turn speech tokens into audio on a token2wav server, while the tokens still arrive.",
        epilog=exit_codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_synth(commands.add_parser, f"{_DEFINITIONS}\n{exit_codes}")
    _add_voice_id(commands.add_parser)
    _add_perf_data(commands.add_parser)
    _add_health(commands.add_parser, exit_codes)
    return parser


def _add_synth(add_parser: Callable[..., argparse.ArgumentParser], epilog: str) -> None:
    parser = add_parser(
        "synth",
        help="speak one utterance into a file, a pipe or a loudspeaker",
        description="Send tokens, write the audio as it arrives, and report how it arrived.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        required=True,
        help=".npy or .json of integers, or text of <|s_123|> or integers; - for text on standard input, "
        "sent as it comes",
    )
    parser.add_argument(
        "--codebooks",
        type=_integer(1),
        default=1,
        metavar="N",
        help="codes of each token in text, where they follow one another; .npy and .json say it by their shape "
        "(default: %(default)s)",
    )
    speaker = parser.add_mutually_exclusive_group(required=True)
    speaker.add_argument(
        "--voice",
        metavar="FILE",
        help=".npz or .safetensors with prompt_tokens (P,), prompt_mel (2P, 80), speaker_embedding (192,)",
    )
    speaker.add_argument(
        "--voice-id", metavar="ID", help="of a voice that the server was sent before (see the command voice-id)"
    )
    speaker.add_argument("--voice-name", metavar="NAME", help="of a voice that the settings of the server name")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"mono file to write, ending in {', '.join(FILE_FORMATS)}; - for standard output (then the report goes to "
        "standard error)",
    )
    parser.add_argument(
        "--format",
        choices=FILE_FORMATS,
        help="of the file (default: what its name ends in; raw, which has no header, for standard output)",
    )
    parser.add_argument("--play", action="store_true", help="play the audio as it comes, with or without --out")
    parser.add_argument(
        "--rate",
        type=_not_negative,
        default=0.0,
        metavar="TOKENS/S",
        help="send tokens at the pace of a language model, such as 25 (default: 0, as fast as they come)",
    )
    parser.add_argument(
        "--tokens-per-request",
        type=_integer(1),
        default=5,
        metavar="N",
        help="tokens in a request, at most; fewer if no more are there yet (default: %(default)s)",
    )
    _add_audio_format(parser, "int16")
    parser.add_argument(
        "--sample-rate",
        type=_integer(1),
        metavar="HZ",
        help="8000, 16000, 22050, 24000, 44100 or 48000 (default: the model's own)",
    )
    parser.add_argument(
        "--steps",
        type=_integer(1),
        metavar="N",
        help="of the ODE, one of the numbers that the server allows: fewer are faster (default: its usual number)",
    )
    parser.add_argument("--json", action="store_true", help="report as one JSON object instead of a table")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    _add_connection(parser)
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=30.0,
        metavar="S",
        help="seconds of silence allowed while the server owes an answer (default: %(default)g)",
    )
    parser.add_argument(
        "--retry",
        type=_integer(0),
        default=0,
        metavar="N",
        help="when no server answers, or it is lost, silent or full, try again that often, after 0.5, 1, 2, then "
        "4 s; no audio comes twice (default: %(default)s)",
    )
    parser.set_defaults(run=synth, refuse=parser.error)


def _add_voice_id(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "voice-id",
        help="print the id of a voice file",
        description="Print the id under which a server knows a voice once it was sent: the hash of its content.",
    )
    parser.add_argument("voice", metavar="FILE", help=".npz or .safetensors")
    parser.set_defaults(run=voice_id)


def _add_perf_data(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "perf-data",
        help="write an utterance as input data for perf_analyzer",
        description="Write an utterance and its voice as JSON for perf_analyzer's option --input-data. Each request "
        "that perf_analyzer makes of it is a whole utterance.",
    )
    parser.add_argument(
        "--tokens", metavar="FILE", required=True, help=".npy, .json or text, as for synth; - for standard input"
    )
    parser.add_argument("--voice", metavar="FILE", required=True, help=".npz or .safetensors")
    parser.add_argument("--out", metavar="JSON", required=True, help="file to write")
    parser.add_argument(
        "--seconds",
        type=_positive,
        metavar="S",
        help="of audio in the utterance: the tokens are cut, or repeated, to that length (default: all, once)",
    )
    parser.set_defaults(run=perf_data)


def _add_health(add_parser: Callable[..., argparse.ArgumentParser], epilog: str) -> None:
    parser = add_parser(
        "health",
        help="find out whether the server works",
        description="Speak three tokens with a voice that has no prompt, check the audio and say how long it took. "
        "Triton's own readiness is not enough: it stays when the process that runs the model has died.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_audio_format(parser, "float32")
    _add_connection(parser)
    parser.add_argument(
        "--timeout", type=_positive, default=10.0, metavar="S", help="seconds for all of it (default: %(default)g)"
    )
    parser.set_defaults(run=health)


def _add_audio_format(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--audio-format",
        choices=AUDIO_FORMATS,
        default=default,
        help="of samples on the wire and in WAV and raw files; mulaw and alaw are G.711 (default: %(default)s)",
    )


def _add_connection(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", default="localhost:8001", metavar="HOST:PORT", help="gRPC endpoint (default: %(default)s)"
    )
    server.add_argument("--model", default="token2wav", metavar="NAME", help="default: %(default)s")
    server.add_argument(
        "--connect-timeout",
        type=_positive,
        default=5.0,
        metavar="S",
        help="seconds in which the server must say that it is there (default: %(default)g)",
    )
    server.add_argument(
        "--max-message-mib",
        type=_integer(1),
        default=64,
        metavar="N",
        help="MiB that a request or a response may have (default: %(default)s)",
    )
    access = parser.add_argument_group("access", "any of --ca, --cert, --key and --server-name turns TLS on")
    access.add_argument("--tls", action="store_true", help="encrypt; the server's certificate must be a trusted one")
    access.add_argument("--ca", metavar="FILE", help="PEM of the authorities to trust, instead of the public ones")
    access.add_argument("--cert", metavar="FILE", help="PEM of this client's certificate, for mutual TLS")
    access.add_argument("--key", metavar="FILE", help="PEM of its private key")
    access.add_argument("--server-name", metavar="NAME", help="in the server's certificate, if the address has another")
    access.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"a token, sent as authorization: Bearer; also from the variable {TOKEN_VARIABLE}. "
        "Only with TLS or to this machine",
    )
    access.add_argument(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="to send with every call; may be repeated. Others on this machine can see it in the process list",
    )


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _integer(least: int) -> Callable[[str], int]:
    """Make a reader of integers that has a bound."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return read


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _not_negative(text: str) -> float:
    """Read a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
