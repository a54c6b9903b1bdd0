"""Reader for a speech language model: synthesizes the tokens that the model prints, as they come.

    my_llm | python examples/llm_stream.py --family stepaudio2 --voice voice.safetensors \\
        --out out.wav

Some models print tokens as text: `<|speech_17|>` or `<|s_17|>` (CosyVoice), `<audio_17>`
(Step-Audio2), `<custom_token_17>` (Orpheus, seven for a token of SNAC). Other text between the
tokens is skipped. Other models return numbers (MiniCPM-o, Chatterbox, and models that emit codes of
a codec): print the numbers with a separator after each. A piece of text may end anywhere, even
within a token.

With `--events URL` the text comes from a server with OpenAI's interface, as server-sent events.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import httpx
import numpy as np
from httpx_sse import SSEError, connect_sse
from numpy.typing import NDArray

from token2wav_client import Client, ClientError, ClientVoice
from token2wav_client.writer import AudioWriter

_NAMES = re.compile(r"<(?:\|(?:s|speech)_|audio_)(\d{1,9})\|?>")
_CUSTOM = re.compile(r"<custom_token_(\d{1,9})>")
_NUMBERS = re.compile(r"(?<!\d)(\d{1,9})(?=\D)")
TOKENS = {
    "cosyvoice": _NAMES,
    "stepaudio2": _NAMES,
    "orpheus": _CUSTOM,
    "minicpmo": _NUMBERS,
    "chatterbox": _NUMBERS,
    "codes": _NUMBERS,
}
# Padding of Step-Audio2, end token of MiniCPM-o, start and end tokens of Chatterbox. The first ten
# tokens of Orpheus are marks.
NOT_SPEECH = {6561, 6562}
_MARKS = {"codes": set[int](), "orpheus": set(range(10))}
# Orpheus counts its codes from 10 on. Code k of a frame is shifted by k times the codebook size.
_ORPHEUS_FIRST, _ORPHEUS_CODES, _ORPHEUS_SIZE = 10, 7, 4096
LONGEST_TOKEN = len("<custom_token_123456789>")
_PATIENCE_S = 60.0  # longest time without an event


def tokens_in(pieces: Iterable[str], family: str = "cosyvoice") -> Iterator[list[int]]:
    """Finds tokens in pieces of text, and yields the tokens that each piece completes.

    Nothing is yielded for a piece that completes no token.
    """
    text, ignored = "", _MARKS.get(family, NOT_SPEECH)
    for piece in chain(pieces, ["\n"]):  # ends a number at the end of the text
        text += piece
        matches = list(TOKENS[family].finditer(text))
        # The text after the last token may be the beginning of another token.
        text = text[matches[-1].end() if matches else 0 :][-LONGEST_TOKEN:]
        if tokens := [number for match in matches if (number := int(match[1])) not in ignored]:
            yield tokens


def frames_of(batches: Iterable[list[int]], codebooks: int) -> Iterator[NDArray[np.int32]]:
    """Groups codes into frames, and yields the frames (n, codebooks) that each batch completes.

    The codes of a frame follow one another. Codes of an incomplete last frame are dropped.
    """
    rest: list[int] = []
    for batch in batches:
        rest += batch
        count = len(rest) // codebooks * codebooks
        if count:
            yield np.array(rest[:count], np.int32).reshape(-1, codebooks)
            rest = rest[count:]


def orpheus_frames(batches: Iterable[list[int]]) -> Iterator[NDArray[np.int32]]:
    """Groups the numbers of Orpheus into frames of SNAC, and yields the frames (n, 7) that each
    batch completes.
    """
    shifts = _ORPHEUS_FIRST + _ORPHEUS_SIZE * np.arange(_ORPHEUS_CODES, dtype=np.int32)
    return (frames - shifts for frames in frames_of(batches, _ORPHEUS_CODES))


def standard_input() -> Iterator[str]:
    """Yields the text that the model prints, at once, without waiting for the end of a line."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := os.read(sys.stdin.fileno(), 65_536):
        yield decoder.decode(data)


def events_of(url: str, body: Path) -> Iterator[str]:
    """Sends a request to a server with OpenAI's interface, and yields the text of its events.

    Args:
        url: address of `chat/completions` or `completions`.
        body: JSON file with the body of the request. `stream` is set to true.
    """
    request = json.loads(body.read_text(encoding="utf-8")) | {"stream": True}
    with (
        httpx.Client(timeout=_PATIENCE_S) as http,
        connect_sse(http, "POST", url, json=request) as source,
    ):
        source.response.raise_for_status()
        for event in source.iter_sse():
            if event.data == "[DONE]":
                return
            choice = json.loads(event.data)["choices"][0]
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Speak the speech tokens in a text on standard input, or in events of a server."
    )
    parser.add_argument(
        "--family",
        choices=TOKENS,
        default="cosyvoice",
        help="family of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--codebooks", type=int, metavar="N", help="codes of a frame, for models of a codec"
    )
    parser.add_argument("--voice", help=".npz or .safetensors; a codec has no voice")
    parser.add_argument(
        "--out", required=True, help="file to write; a WAV file grows while the audio arrives"
    )
    parser.add_argument(
        "--events", metavar="URL", help="chat/completions or completions of a language model server"
    )
    parser.add_argument("--body", type=Path, metavar="FILE", help="JSON of the request to --events")
    parser.add_argument("--url", default="localhost:8001")
    options = parser.parse_args()
    if (options.events is None) != (options.body is None):
        parser.error("--events and --body belong together")
    if options.codebooks is not None and options.codebooks < 1:
        parser.error(f"--codebooks: {options.codebooks} is not positive")
    text = standard_input() if options.events is None else events_of(options.events, options.body)
    tokens = tokens_in(text, options.family)
    frames: Iterable[list[int] | NDArray[np.int32]] = tokens
    if options.family == "orpheus":
        frames = orpheus_frames(tokens)
    elif options.codebooks is not None:
        frames = frames_of(tokens, options.codebooks)
    try:
        voice = None if options.voice is None else ClientVoice.load(options.voice)
        with AudioWriter(options.out, "int16") as writer, Client(options.url, retries=5) as client:
            for chunk in client.synthesize(frames, voice, audio_format="int16"):
                writer.write(chunk.audio, chunk.sample_rate)
                print(
                    f"{chunk.arrival_s:7.2f} s: {chunk.duration_s:.2f} s of audio", file=sys.stderr
                )
    except (ClientError, httpx.HTTPError, SSEError, OSError) as error:
        sys.exit(f"llm_stream: {error}")
    except (ValueError, LookupError) as error:
        sys.exit(f"llm_stream: the request or an event is not in OpenAI's form: {error}")


if __name__ == "__main__":
    main()
