"""Commands `token2wav voice` and `token2wav tokenize`: arguments and reports on recordings."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from token2wav.commands import CommandParser
from token2wav.config.values import number
from token2wav.hub import MODEL_HELP, HubError, model_folder
from token2wav_voice.errors import FrontEndError, OutputError
from token2wav_voice.front_end import MIN_VOICE_SECONDS, FrontEnd, write
from token2wav_voice.recording import MIN_SECONDS, Recording

VOICE, TOKENIZE = "token2wav voice", "token2wav tokenize"
DONE, UNUSABLE, INTERRUPTED = 0, 2, 130

_EXIT_CODES = (
    "exit codes:\n"
    "  0    done\n"
    "  2    wrong usage, or an unusable recording, model folder or output file\n"
    "  130  interrupted (Ctrl-C)\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `token2wav voice` and returns its exit code."""
    return _run(parser(), arguments, _save_voice, ".safetensors", MIN_VOICE_SECONDS)


def tokenize(arguments: Sequence[str] | None = None) -> int:
    """Runs `token2wav tokenize` and returns its exit code."""
    return _run(tokenize_parser(), arguments, _save_tokens, ".npy", MIN_SECONDS)


def parser() -> CommandParser:
    """Returns the parser of `token2wav voice`."""
    parser = _parser(VOICE, "Create voices for token2wav from recordings.")
    create = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "create",
        help="create a voice from a recording",
        description="Create a voice from a recording, with the speech tokenizer and "
        "campplus.onnx of a model folder.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_recording(create, f"of the speaker, {MIN_VOICE_SECONDS:g} to 30 s")
    create.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="voice file to write (.safetensors)"
    )
    return parser


def tokenize_parser() -> CommandParser:
    """Returns the parser of `token2wav tokenize`."""
    parser = _parser(
        TOKENIZE, "Turn a recording into speech tokens with the speech tokenizer of a model folder."
    )
    _add_recording(parser, f"of speech, {MIN_SECONDS:g} to 30 s")
    out = (
        "token file to write (.npy, int32 (n,)); default: text on standard output, with "
        "the report on standard error"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    return parser


def _parser(program: str, description: str) -> CommandParser:
    return CommandParser(
        prog=program,
        description=description,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_recording(parser: argparse.ArgumentParser, recording: str) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help=f"{MODEL_HELP}, with campplus.onnx and a speech tokenizer",
    )
    parser.add_argument(
        "--wav",
        required=True,
        metavar="FILE",
        help=f"recording {recording}; WAV, MP3, M4A or another audio file",
    )
    parser.add_argument(
        "--start",
        type=number(float),
        default=0.0,
        metavar="S",
        help="first second of the recording to use (default: 0)",
    )
    parser.add_argument(
        "--end",
        type=number(float),
        metavar="S",
        help="last second of the recording to use (default: the end)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    save: Callable[[FrontEnd, Recording, Any], int],
    suffix: str,
    min_seconds: float,
) -> int:
    """Runs a command, which saves a voice or tokens of a recording, and returns its exit code."""
    options = parser.parse_args(arguments)
    try:
        if options.out is not None:
            _check_path(options.out, suffix)
        front_end = FrontEnd(model_folder(options.model, "front_end"))
        recording = Recording.load(
            options.wav, start_s=options.start, end_s=options.end, min_seconds=min_seconds
        )
        for note in recording.notes:
            print(f"{parser.prog}: note: {note}", file=sys.stderr)
        tokens = save(front_end, recording, options.out)
        _report(recording, tokens, options, sys.stderr if options.out is None else sys.stdout)
    except (FrontEndError, HubError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    # The program that reads the tokens has ended. Python would report the closed pipe again at
    # exit.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def _check_path(path: Path, suffix: str) -> None:
    """Raises OutputError if a file cannot be written at `path`, or its suffix is not `suffix`."""
    if path.suffix != suffix:
        raise OutputError(f"{path}: the name must end in {suffix}")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is not a regular file")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: no permission to write")


def _save_voice(front_end: FrontEnd, recording: Recording, out: Path) -> int:
    voice = front_end.voice(recording)
    voice.save(out)
    return len(voice.prompt_tokens)


def _save_tokens(front_end: FrontEnd, recording: Recording, out: Path | None) -> int:
    tokens = front_end.tokens(recording)
    if out is None:
        print("".join(f"<|s_{token}|>" for token in tokens), flush=True)
    else:
        content = io.BytesIO()
        np.save(content, tokens)
        write(out, content.getvalue())
    return len(tokens)


def _report(recording: Recording, tokens: int, options: argparse.Namespace, file: TextIO) -> None:
    out = None if options.out is None else str(options.out)
    if options.json:
        report = {
            "wav": str(recording.path),
            "out": out,
            "seconds": round(recording.seconds, 6),
            "rate_hz": recording.rate_hz,
            "channels": recording.channels,
            "tokens": tokens,
            "rms_dbfs": round(recording.rms_dbfs, 2),
            "peak_dbfs": round(recording.peak_dbfs, 2),
            "full_scale_share": recording.full_scale_share,
            "notes": recording.notes,
        }
        print(json.dumps(report, indent=2), file=file)
        return
    levels = f"level {recording.rms_dbfs:.1f} dBFS, peak {recording.peak_dbfs:.1f} dBFS"
    print(
        "" if out is None else f"{out}: ",
        f"{recording.seconds:.2f} s, {tokens} tokens, {levels}",
        sep="",
        file=file,
    )
