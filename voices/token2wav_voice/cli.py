"""Commands `token2wav-voice` and `token2wav-tokenize`: they read arguments and report on recordings."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from token2wav_voice import output
from token2wav_voice.errors import FrontEndError
from token2wav_voice.front_end import MIN_VOICE_SECONDS, FrontEnd
from token2wav_voice.recording import MIN_SECONDS, Recording
from token2wav_voice.report import as_json, as_line

VOICE, TOKENIZE = "token2wav-voice", "token2wav-tokenize"
DONE, UNUSABLE, INTERRUPTED = 0, 2, 130

_EXIT_CODES = """\
exit codes:
  0    done
  2    wrong usage, or a recording, model folder or output file that cannot be used
  130  interrupted (Ctrl-C)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `token2wav-voice` and returns its exit code."""
    parser = _parser(VOICE, "Make voices for token2wav from recordings.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    create = commands.add_parser(
        "create",
        help="make a voice of a recording",
        description="Make a voice of a recording with the speech tokenizer and campplus.onnx of a model folder.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_recording(create, f"of who is to speak, {MIN_VOICE_SECONDS:g} to 30 s")
    create.add_argument("--out", required=True, type=Path, metavar="FILE", help=".safetensors file to write")
    create.set_defaults(run=_create)
    return _run(VOICE, parser, arguments)


def tokenize(arguments: Sequence[str] | None = None) -> int:
    """Runs `token2wav-tokenize` and returns its exit code."""
    parser = _parser(TOKENIZE, "Turn a recording into speech tokens with the speech tokenizer of a model folder.")
    _add_recording(parser, f"to turn into tokens, {MIN_SECONDS:g} to 30 s")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=".npy file to write, int32 (n,); default: text such as <|s_12|> on standard output, with the report on "
        "standard error",
    )
    parser.set_defaults(run=_tokenize)
    return _run(TOKENIZE, parser, arguments)


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=description, epilog=_EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"{program} {version('token2wav')}")
    return parser


def _add_recording(parser: argparse.ArgumentParser, recording: str) -> None:
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder in CosyVoice3's format")
    parser.add_argument("--wav", required=True, metavar="FILE", help=f"recording {recording}; WAV, FLAC, OGG or MP3")
    parser.add_argument("--start", type=_seconds, default=0.0, metavar="S", help="second to begin at (default: 0)")
    parser.add_argument("--end", type=_seconds, metavar="S", help="second to stop at (default: the end)")
    parser.add_argument("--json", action="store_true", help="report as JSON")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _run(program: str, parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(f"{program}: {line}", file=sys.stderr)

    try:
        options.run(options, say)
    except FrontEndError as error:
        say(f"error: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the tokens has gone; Python would complain again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def _create(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    output.check(options.out, ".safetensors")
    front_end = FrontEnd(options.model)
    recording = _recording(options, MIN_VOICE_SECONDS, say)
    voice = front_end.voice(recording)
    voice.save(options.out)
    report = as_json if options.json else as_line
    print(report(recording, len(voice.prompt_tokens), str(options.out)))


def _tokenize(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    if options.out is not None:
        output.check(options.out, ".npy")
    front_end = FrontEnd(options.model)
    recording = _recording(options, MIN_SECONDS, say)
    tokens = front_end.tokens(recording)
    report = as_json if options.json else as_line
    if options.out is None:
        print("".join(f"<|s_{token}|>" for token in tokens), flush=True)
        print(report(recording, len(tokens), None), file=sys.stderr)
    else:
        content = io.BytesIO()
        np.save(content, tokens)
        output.write(options.out, content.getvalue())
        print(report(recording, len(tokens), str(options.out)))


def _recording(options: argparse.Namespace, min_seconds: float, say: Callable[[str], None]) -> Recording:
    recording = Recording.load(options.wav, start_s=options.start, end_s=options.end, min_seconds=min_seconds)
    for note in recording.notes:
        say(f"note: {note}")
    return recording
