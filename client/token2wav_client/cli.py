"""Command line of `token2wav-client`: parses arguments, runs a command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from token2wav_client import __version__
from token2wav_client.arguments import add_connection, add_retry, at_least_one, not_negative, positive
from token2wav_client.audio import AUDIO_FORMATS
from token2wav_client.commands import health, synth, voice_id
from token2wav_client.errors import EXIT_CODES, INTERRUPTED, TERMINATED, ClientError
from token2wav_client.perf_data import add_perf_data
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
        return _give_up("terminated", TERMINATED)
    except KeyboardInterrupt:
        return _give_up("interrupted", INTERRUPTED)


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
    add_perf_data(commands.add_parser)
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
        type=at_least_one,
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
        type=not_negative,
        default=0.0,
        metavar="TOKENS/S",
        help="send tokens at the pace of a language model, such as 25 (default: 0, as fast as they come)",
    )
    parser.add_argument(
        "--tokens-per-request",
        type=at_least_one,
        default=5,
        metavar="N",
        help="tokens in a request, at most; fewer if no more are there yet (default: %(default)s)",
    )
    _add_audio_format(parser, "int16")
    parser.add_argument(
        "--sample-rate",
        type=at_least_one,
        metavar="HZ",
        help="8000, 16000, 22050, 24000, 44100 or 48000 (default: the model's own)",
    )
    parser.add_argument(
        "--steps",
        type=at_least_one,
        metavar="N",
        help="of the ODE, one of the numbers that the server allows: fewer are faster (default: its usual number)",
    )
    parser.add_argument("--json", action="store_true", help="report as one JSON object instead of a table")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    add_connection(parser)
    parser.add_argument(
        "--timeout",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds of silence allowed while the server owes an answer (default: %(default)g)",
    )
    add_retry(parser)
    parser.set_defaults(run=synth, refuse=parser.error)


def _add_voice_id(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "voice-id",
        help="print the id of a voice file",
        description="Print the id under which a server knows a voice once it was sent: the hash of its content.",
    )
    parser.add_argument("voice", metavar="FILE", help=".npz or .safetensors")
    parser.set_defaults(run=voice_id)


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
    add_connection(parser)
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="seconds for all of it (default: %(default)g)"
    )
    parser.set_defaults(run=health)


def _add_audio_format(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--audio-format",
        choices=AUDIO_FORMATS,
        default=default,
        help="of samples on the wire and in WAV and raw files; mulaw and alaw are G.711 (default: %(default)s)",
    )
