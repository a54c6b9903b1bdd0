"""Input data for NVIDIA's perf_analyzer: an utterance as the one request that it will send again and again.

perf_analyzer has no tensors of its own that this server would take: tokens must be in the vocabulary, and the prompt's
mel must fit its tokens. So what to send is written to a file, in perf_analyzer's JSON format.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from token2wav_client.arguments import positive
from token2wav_client.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN
from token2wav_client.errors import OK, OutputError, TokenError
from token2wav_client.report import tell
from token2wav_client.token_source import open_tokens
from token2wav_client.tokens import TokenArray, as_tokens
from token2wav_client.voice import FIELDS, ClientVoice


def add_perf_data(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command `perf-data`."""
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
        type=positive,
        metavar="S",
        help="of audio in the utterance: the tokens are cut, or repeated, to that length (default: all, once)",
    )
    parser.set_defaults(run=_run_perf_data)


def perf_data(tokens: TokenArray, voice: ClientVoice) -> dict[str, Any]:
    """The utterance as perf_analyzer's document: one stream of one step.

    Args:
        tokens: int32, shape (tokens,).
        voice: to speak in; it travels with every request.

    Raises:
        TokenError: there are no tokens.
    """
    if not len(tokens):
        raise TokenError("tokens: none; an utterance has at least 1")
    arrays = {"tokens": tokens} | {name: getattr(voice, name) for name in FIELDS}
    # perf_analyzer reads flat lists; the shapes are dynamic, so each has to be said.
    step = {name: {"content": array.ravel().tolist(), "shape": list(array.shape)} for name, array in arrays.items()}
    return {"data": [step]}


def of_length(tokens: TokenArray, seconds: float) -> TokenArray:
    """Tokens cut, or repeated from their start, to an utterance of a length; at least one."""
    count = max(1, round(seconds * SAMPLE_RATE / SAMPLES_PER_TOKEN))
    return np.resize(tokens, (count, *tokens.shape[1:])) if len(tokens) else tokens


def _run_perf_data(options: argparse.Namespace) -> int:
    pieces = [as_tokens(piece) for piece in open_tokens(options.tokens).pieces]
    tokens = np.concatenate(pieces) if pieces else as_tokens([])
    if options.seconds is not None:
        tokens = of_length(tokens, options.seconds)
    document = perf_data(tokens, ClientVoice.load(options.voice))
    try:
        Path(options.out).write_text(json.dumps(document) + "\n")
    except OSError as error:
        raise OutputError(f"{options.out}: cannot be written ({error})") from None
    seconds = len(tokens) * SAMPLES_PER_TOKEN / SAMPLE_RATE
    tell(f"{options.out}: an utterance of {len(tokens)} tokens, {seconds:g} s")
    return OK
