"""Command line of the client: the subcommands synth, health, bench, voice-id and perf-data."""

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

from token2wav.commands import PROGRAM, CommandParser
from token2wav_client import commands
from token2wav_client.audio import AUDIO_FORMATS, AudioFormat
from token2wav_client.bench import Load
from token2wav_client.commands import TOKEN_VARIABLE
from token2wav_client.errors import EXIT_CODES, ClientError
from token2wav_client.writer import FILE_FORMATS

_EXIT_CODES = "exit codes:\n" + "\n".join(
    f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items()
)
_DEFINITIONS = (
    "times in the report:\n"
    "  arrival   seconds since the first tokens were sent\n"
    "  latency   seconds since the client sent the request that the chunk answers: the later "
    "of the request\n"
    "            with the last token in the chunk, and the request that the server names in "
    "its response\n"
    "  gap       seconds since the previous chunk\n"
)
_RATE = "pace at which tokens are sent, such as 25 for a language model; 0 sends each token at once"
_BENCH_FIGURES = (
    "figures (docs/benchmarking.md defines them; times count from the first token):\n"
    "  done, cut, fail   utterances that were complete, open at the time limit, or ended by an "
    "error\n"
    "  RTFX              seconds of audio that arrive in a second: all streams, and each. Below 1 "
    "for each, the server\n"
    "                    cannot keep up with so many streams (with --rate, the pace of the tokens "
    "bounds it too)\n"
    "  first audible     an immediate player plays the first sound (Nari)\n"
    "  underruns         utterances in which an immediate player stalls (Nari)\n"
    "  C50, C100, C200   share of utterances whose largest stall is at most 50, 100 or 200 ms "
    "(sglang-omni)\n"
    "  real-time factor  time / audio; time to the end, and from the first chunk to the end "
    "(vllm-omni)\n"
    "  gap-free start    a player that starts then plays to the end without a gap\n"
    "  buffer            share of utterances without a gap for a player that starts 50, 100 or 200 "
    "ms after the first chunk\n"
)


def _run(
    command: Callable[[argparse.Namespace], int],
    make_parser: Callable[[], CommandParser],
    arguments: Sequence[str],
) -> int:
    """Runs a command and returns its exit code, one of `EXIT_CODES`."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.refuse = parser.error
    # Warnings report retries and text that the token parser skipped.
    logging.basicConfig(format=f"{parser.prog}: %(message)s", stream=sys.stderr)
    try:
        with _terminable():
            return command(options)
    except ClientError as error:
        message, exit_code = f"error: {error}", error.exit_code
    except _Terminated:
        message, exit_code = "terminated", 128 + signal.SIGTERM
    except KeyboardInterrupt:
        message, exit_code = "interrupted", 128 + signal.SIGINT
    print(f"{parser.prog}: {message}", file=sys.stderr)
    return exit_code


class _Terminated(KeyboardInterrupt):
    """Interrupt by SIGTERM, which stops a command in the same way as Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Context manager in which the first SIGTERM raises `_Terminated`, so that audio is kept.

    A second SIGTERM ends the process.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def synth_parser() -> CommandParser:
    """Returns the parser of `token2wav synth`."""
    parser = _parser(
        "synth",
        "Send the tokens of one utterance, write the audio as it arrives, and report the "
        "time of each chunk.",
        f"{_DEFINITIONS}\n{_EXIT_CODES}",
    )
    _add_utterance(parser)
    add_connection(parser)
    return parser


def health_parser() -> CommandParser:
    """Returns the parser of `token2wav health`."""
    parser = _parser(
        "health",
        "Synthesize three tokens with a voice that has no prompt, check the audio, and "
        "print how long the synthesis took.\n"
        "Triton's own readiness check is not enough, because it still succeeds after the "
        "process of the model has died.",
        _EXIT_CODES,
    )
    _add_audio_format(parser, "float32")
    _option(parser, "--timeout S", "time limit of the whole check, in seconds", 10, type=_SECONDS)
    add_connection(parser)
    return parser


def bench_parser() -> CommandParser:
    """Returns the parser of `token2wav bench`."""
    parser = _parser(
        "bench",
        "Measure a running server as NVIDIA measures Riva: N parallel streams, each of which sends "
        "an utterance, waits\nfor all of its audio, and sends the next one. The command prints "
        "latency to first audio, latency between\nchunks and throughput, and the figures of other "
        "benchmarks. By default it takes at most two minutes.",
        f"{_BENCH_FIGURES}\n{_EXIT_CODES}",
    )
    option, count, default = partial(_option, parser), _number(int, 1), Load()
    option(
        "--streams N",
        "numbers of parallel streams, a row for each",
        list(default.streams),
        type=count,
        nargs="+",
    )
    option("--rounds N", "utterances that each stream sends", default.rounds, type=count)
    option(
        "--row-seconds S",
        "time limit of a row; utterances that are open then are cut",
        default.row_seconds,
        type=_SECONDS,
    )
    option(
        "--utterance-seconds S",
        "mean length of an utterance; the ten utterances have half of it to one and a half",
        default.utterance_seconds,
        type=_SECONDS,
    )
    option("--rate TOKENS/S", _RATE, 0, type=_number(float))
    option(
        "--tokens FILE",
        "tokens in the formats of the command synth, cut or repeated to the length of each "
        "utterance (default: random tokens)",
    )
    option(
        "--codebooks N",
        "number of codes in each token of a text file (default: 1), or in each random token "
        "(default: all that the model has)",
        type=count,
    )
    _add_voice(parser)
    option(
        "--out FILE",
        "JSON file of figures and recordings; a picture (.png) is written beside it (default: "
        "bench.json; with --recordings: no files)",
    )
    option(
        "--recordings FILE",
        "JSON file of an earlier run: compute the tables from its recordings, without a server",
    )
    option("--quiet", "print no progress bar and no tables", action="store_true")
    _add_timeout(parser)
    add_connection(parser)
    return parser


def voice_id_parser() -> CommandParser:
    """Returns the parser of `token2wav voice-id`."""
    parser = _parser(
        "voice-id",
        "Print the id of a voice, which is a hash of its content. Once a server has "
        "received the voice, requests can name\n"
        "it by this id.",
    )
    parser.add_argument("voice", metavar="FILE", help=".npz or .safetensors")
    return parser


def perf_data_parser() -> CommandParser:
    """Returns the parser of `token2wav perf-data`."""
    parser = _parser(
        "perf-data",
        "Write an utterance and its voice as JSON for perf_analyzer's option --input-data.\n"
        "Each request that perf_analyzer sends is one whole utterance.",
    )
    option = partial(_option, parser)
    option(
        "--tokens FILE",
        "tokens in the formats of the command synth: .npy, .json or text; - for text from "
        "standard input",
        required=True,
    )
    option("--voice FILE", ".npz or .safetensors (default: none, for a model without voices)")
    option("--out JSON", "JSON file to write", required=True)
    length = "tokens of the utterance; those of the file are cut or repeated (default: each once)"
    option("--length N", length, type=_number(int, 1))
    return parser


def _parser(name: str, description: str, epilog: str = "") -> CommandParser:
    return CommandParser(
        prog=f"{PROGRAM} {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _option(parser: Any, spelling: str, meaning: str, default: Any = None, **more: Any) -> None:
    """Adds an option to a parser.

    Args:
        spelling: flag and metavar as the usage shows them, such as `--retry N`.
        meaning: help text, to which the default is appended.
        more: further arguments of `add_argument`.
    """
    flag, *metavar = spelling.split()
    suffix = "" if default is None else " (default: %(default)s)"
    if metavar:  # argparse rejects a metavar for a flag without a value
        more["metavar"] = metavar[0]
    parser.add_argument(flag, help=meaning + suffix, default=default, **more)


def _add_utterance(parser: argparse.ArgumentParser) -> None:
    option, count = partial(_option, parser), _number(int, 1)
    tokens = (
        ".npy or .json file of integers, or of latents; or text of <|s_123|> or integers; - for "
        "text from standard input, sent as it arrives"
    )
    option("--tokens FILE", tokens, required=True)
    option(
        "--codebooks N",
        "number of codes in each token of a text; .npy and .json files have a shape instead",
        1,
        type=count,
    )
    _add_voice(parser)
    endings = ", ".join(FILE_FORMATS)
    option(
        "--out FILE",
        f"audio file, ending in {endings}; - for audio on standard output and the report on "
        "standard error",
    )
    option(
        "--format",
        "format of the file (default: the ending of its name; raw for standard output)",
        choices=FILE_FORMATS,
    )
    option(
        "--play",
        "play the audio as it arrives; possible with and without --out",
        action="store_true",
    )
    option("--rate TOKENS/S", _RATE, 0, type=_number(float))
    option(
        "--tokens-per-request N",
        "maximum number of tokens in a request; a request has fewer if no more have arrived",
        5,
        type=count,
    )
    _add_audio_format(parser, "int16")
    option(
        "--sample-rate HZ",
        "sample rate of the audio: 8000, 16000, 22050, 24000, 44100 or 48000 (default: the "
        "rate of the model)",
        type=count,
    )
    option(
        "--steps N",
        "number of ODE steps, one of the numbers in the server's settings; fewer steps are "
        "faster (default: the number of the server)",
        type=count,
    )
    option(
        "--speed X",
        "tempo of the speech, 0.5 to 2, at the same pitch; codecs have only 1",
        1.0,
        type=_number(float),
    )
    option(
        "--decoder-noise",
        "whether the decoder adds its noise, for models with noise (default: the setting of the "
        "server)",
        choices=("on", "off"),
    )
    option(
        "--end-after-repeats N",
        "equal tokens in a row after which the server ends the utterance; 0 for no limit (default: "
        "the setting of the server)",
        type=_number(int),
    )
    option(
        "--end-after-silence S",
        "seconds of audio below -50 dBFS after which the server ends the utterance; 0 for no limit "
        "(default: the setting of the server)",
        type=_number(float),
    )
    option("--json", "print the report as one JSON object instead of a table", action="store_true")
    option("--quiet", "print no progress bar and no table", action="store_true")
    _add_timeout(parser)
    retry_help = (
        "number of retries, after pauses of 0.5, 1, 2 and then 4 s, if the server is "
        "unreachable, lost, silent or full; "
    )
    option("--retry N", f"{retry_help}audio never arrives twice", 0, type=_number(int))


def _add_voice(parser: argparse.ArgumentParser) -> None:
    speaker = parser.add_mutually_exclusive_group()
    arrays = "prompt_tokens (P,), prompt_mel (2P, 80), speaker_embedding (192,)"
    _option(speaker, "--voice FILE", f".npz or .safetensors voice file with {arrays}")
    _option(
        speaker,
        "--voice-id ID",
        "id of a voice that the server has received before (`token2wav voice-id` prints the id)",
    )
    _option(speaker, "--voice-name NAME", "name of a voice in the server's settings")


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    meaning = "longest wait for the next response of the server, in seconds"
    _option(parser, "--timeout S", meaning, 30, type=_SECONDS)


def _add_audio_format(parser: argparse.ArgumentParser, default: AudioFormat) -> None:
    meaning = "encoding of samples on the wire and in WAV and raw files; mulaw and alaw are G.711"
    _option(parser, "--audio-format", meaning, default, choices=AUDIO_FORMATS)


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the options by which a command reaches a server."""
    option = partial(_option, parser.add_argument_group("server"))
    option("--url HOST:PORT", "gRPC address of the server", "localhost:8001")
    option("--model NAME", "name of the Triton model", "token2wav")
    option(
        "--connect-timeout S",
        "time limit for the connection to the server, in seconds",
        5,
        type=_SECONDS,
    )
    option(
        "--max-message-mib N",
        "largest size of a request or a response, in MiB",
        64,
        type=_number(int, 1),
    )
    option(
        "--keepalive S",
        "seconds between pings of an idle connection, at least 2; 0 for none",
        0,
        type=_number(float),
    )
    access = parser.add_argument_group(
        "access", "--ca, --cert, --key and --server-name each turn TLS on"
    )
    option = partial(_option, access)
    option(
        "--tls",
        "encrypt the connection; the server needs a certificate of a trusted authority",
        action="store_true",
    )
    option(
        "--ca FILE",
        "PEM file of the certificate authorities to trust, instead of the public authorities",
    )
    option("--cert FILE", "PEM file of the client's certificate, for mutual TLS")
    option("--key FILE", "PEM file of the client's private key")
    option(
        "--server-name NAME",
        "host name in the server's certificate, if it differs from the host in --url",
    )
    token_help = (
        "file with an access token, sent as authorization: Bearer; the variable "
        f"{TOKEN_VARIABLE} can hold the token instead. "
    )
    option("--token-file FILE", f"{token_help}The token is sent only with TLS or to this machine")
    header_help = (
        "header of every call; can be repeated. Other users of this machine can see the "
        "value in the process list"
    )
    option("--header NAME=VALUE", header_help, type=_header, action="append")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _number(
    kind: type[int] | type[float], least: int = 0, *, above: bool = False
) -> Callable[[str], float]:
    """Returns an argparse type that reads a finite number of at least, or above, `least`."""
    expected = (
        f"{'an integer' if kind is int else 'a number'} "
        f"{'above' if above else 'of at least'} {least}"
    )

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return read


_SECONDS = _number(float, above=True)

synth = partial(_run, commands.synth, synth_parser)
health = partial(_run, commands.health, health_parser)
bench = partial(_run, commands.bench, bench_parser)
voice_id = partial(_run, commands.voice_id, voice_id_parser)
perf_data = partial(_run, commands.perf_data, perf_data_parser)
