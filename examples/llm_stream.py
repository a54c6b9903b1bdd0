"""Reader for a speech language model: synthesizes the tokens that the model prints, as they come.

    my_llm | python examples/llm_stream.py --family stepaudio2 --voice voice.safetensors --out
    out.wav

Some models print tokens as text: `<|speech_17|>` or `<|s_17|>` (CosyVoice), `<audio_17>`
(Step-Audio2). Other text between the tokens is skipped. Other models return numbers (MiniCPM-o,
Chatterbox): print the numbers with a separator after each. A piece of text may end anywhere, even
within a token.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain

from token2wav_client import Client, ClientError, ClientVoice
from token2wav_client.writer import AudioWriter

_NAMES = re.compile(r"<(?:\|(?:s|speech)_|audio_)(\d{1,9})\|?>")
_NUMBERS = re.compile(r"(?<!\d)(\d{1,9})(?=\D)")
TOKENS = {"cosyvoice": _NAMES, "stepaudio2": _NAMES, "minicpmo": _NUMBERS, "chatterbox": _NUMBERS}
# Padding of Step-Audio2, end token of MiniCPM-o, start and end tokens of Chatterbox.
NOT_SPEECH = {6561, 6562}
LONGEST_TOKEN = len("<|speech_123456789|>")


def tokens_in(pieces: Iterable[str], family: str = "cosyvoice") -> Iterator[list[int]]:
    """Finds tokens in pieces of text, and yields the tokens that each piece completes.

    Nothing is yielded for a piece that completes no token.
    """
    text = ""
    for piece in chain(pieces, ["\n"]):  # ends a number at the end of the text
        text += piece
        found = list(TOKENS[family].finditer(text))
        # The text after the last token may be the beginning of another token.
        text = text[found[-1].end() if found else 0 :][-LONGEST_TOKEN:]
        if tokens := [number for match in found if (number := int(match[1])) not in NOT_SPEECH]:
            yield tokens


def standard_input() -> Iterator[str]:
    """Yields the text that the model prints, at once, without waiting for the end of a line."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := os.read(sys.stdin.fileno(), 65_536):
        yield decoder.decode(data)


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(
        description="Speak the speech tokens in a text on standard input."
    )
    parser.add_argument(
        "--family",
        choices=TOKENS,
        default="cosyvoice",
        help="family of the model (default: %(default)s)",
    )
    parser.add_argument("--voice", required=True, help=".npz or .safetensors")
    parser.add_argument(
        "--out", required=True, help="file to write; a WAV file grows while the audio arrives"
    )
    parser.add_argument("--url", default="localhost:8001")
    options = parser.parse_args()
    try:
        voice = ClientVoice.load(options.voice)
        with AudioWriter(options.out, "int16") as writer, Client(options.url, retries=5) as client:
            for chunk in client.synthesize(
                tokens_in(standard_input(), options.family), voice, audio_format="int16"
            ):
                writer.write(chunk.audio, chunk.sample_rate)
                print(
                    f"{chunk.arrival_s:7.2f} s: {chunk.duration_s:.2f} s of audio", file=sys.stderr
                )
    except ClientError as error:
        sys.exit(f"llm_stream: {error}")


if __name__ == "__main__":
    main()
