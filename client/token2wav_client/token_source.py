"""Token sources of the command line: array files, text files and pipes."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from token2wav_client.errors import TokenError
from token2wav_client.input_file import UNREADABLE, array_in_npy, content_of, reason
from token2wav_client.tokens import TokenParser, as_tokens

Token = int | list[int] | list[float]  # an integer, the codes of several codebooks, or a latent

_READ_BYTES = 65_536

logger = logging.getLogger("token2wav_client")


@dataclass(frozen=True)
class TokenSource:
    """Token source: an iterator over tokens, and the shape of all tokens if it is known.

    The iterator yields tokens in pieces, as soon as they are known.

    Attributes:
        shape: (tokens,), (tokens, codebooks) or (latents, size); None for text, where only its end
            determines the number of tokens.
    """

    pieces: Iterator[Sequence[Token]]
    shape: tuple[int, ...] | None

    @property
    def count(self) -> int | None:
        """Number of tokens; None for text."""
        return None if self.shape is None else self.shape[0]


def open_tokens(name: str, codebooks: int = 1) -> TokenSource:
    """Opens a token source: a `.npy` file with an array, a `.json` file with a list, or text.

    Any other file, a FIFO and `-` contain text. Text is read during the iteration over `pieces`, so
    this iteration raises errors in the text, and at its end logs the count of skipped special
    tokens. Raises TokenError if the file cannot be opened or holds no tokens.

    Args:
        name: path of the file; `-` for standard input.
        codebooks: consecutive codes in text that form one token. For arrays and lists
            this argument has no effect, because their shape has the number.
    """
    if name == "-":
        # FileIO has no buffer between the pipe and the parser.
        file, label = FileIO(sys.stdin.fileno(), closefd=False), "standard input"
        return TokenSource(_grouped(_read_text(file, label), codebooks, label), None)
    path = Path(name)
    readers: dict[str, Callable[[bytes], Any]] = {".npy": array_in_npy, ".json": _read_json}
    try:
        if path.suffix not in readers:
            return TokenSource(_grouped(_read_text(FileIO(path), name), codebooks, name), None)
        tokens = as_tokens(readers[path.suffix](content_of(path)))
    except TokenError as error:
        raise TokenError(f"{name}: {error}") from None
    except UNREADABLE as error:
        raise TokenError(f"{name}: cannot read tokens ({reason(error)})") from None
    return TokenSource(iter([tokens.tolist()]), tokens.shape)


def _read_json(content: bytes) -> Any:
    values = json.loads(content)
    if not isinstance(values, list):
        raise TokenError("tokens: expected a JSON list of integers")
    for token in values:
        fits = type(token) is int or (
            isinstance(token, list) and all(type(number) in (int, float) for number in token)
        )
        if not fits:
            raise TokenError("tokens: expected a JSON list of integers, or of lists of numbers")
    return values


def _grouped(pieces: Iterator[list[int]], codebooks: int, name: str) -> Iterator[Sequence[Token]]:
    """Groups the codes in text into tokens, and yields each token when its codes have arrived."""
    if codebooks == 1:
        yield from pieces
        return
    codes: list[int] = []
    for piece in pieces:
        codes += piece
        end = len(codes) // codebooks * codebooks
        if end:
            yield [codes[begin : begin + codebooks] for begin in range(0, end, codebooks)]
            del codes[:end]
    if codes:
        raise TokenError(
            f"{name}: tokens: the text ends after {len(codes)} of the {codebooks} codes of "
            "its last token"
        )


def _read_text(file: FileIO, name: str) -> Iterator[list[int]]:
    """Yields tokens as soon as their text arrives.

    os.read returns the bytes that a pipe holds and does not wait for a full buffer.
    """
    parser = TokenParser()
    try:
        with file:
            while text := os.read(file.fileno(), _READ_BYTES):
                if tokens := parser.feed(text):
                    yield tokens
        if tokens := parser.close():
            yield tokens
        if parser.skipped:
            logger.warning(
                "%s: skipped %d special tokens that are not speech tokens; the first is %s",
                name,
                parser.skipped,
                parser.first_skipped,
            )
    except TokenError as error:
        raise TokenError(f"{name}: {error}") from None
    except OSError as error:
        raise TokenError(f"{name}: cannot read tokens ({reason(error)})") from None


def batches(pieces: Iterable[Sequence[Token]], size: int) -> Iterator[Sequence[Token]]:
    """Cuts pieces into batches of at most `size` tokens, without waiting for a batch to fill."""
    for piece in pieces:
        for begin in range(0, len(piece), size):
            yield piece[begin : begin + size]


def paced(
    pieces: Iterable[Sequence[Token]],
    tokens_per_second: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Sequence[Token]]:
    """Delays batches to the pace of a language model with a given speed.

    Token k (counted from 1) is due k / tokens_per_second seconds after the first batch was
    requested. A batch is delayed until its last token is due. For example, at 25 tokens per second
    the first batch of 5 tokens is due after 0.2 s. Batches that arrive later are not delayed.
    """
    began = clock()
    count = 0
    for piece in pieces:
        count += len(piece)
        pause_s = began + count / tokens_per_second - clock()
        if pause_s > 0:
            sleep(pause_s)
        yield piece
