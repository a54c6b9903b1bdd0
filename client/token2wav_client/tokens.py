"""Speech tokens: a parser of text that may be split anywhere, and checks of token arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from token2wav_client.errors import TokenError

TokenArray = npt.NDArray[np.int32 | np.float32]  # tokens, or latents

LATENTS = "latents"  # input of a model that takes latents, in place of `tokens`

MAX_TOKEN = int(np.iinfo(np.int32).max)
MAX_DIGITS = len(str(MAX_TOKEN))

# `<|s_12|>` is complete by itself. A plain integer is complete only when another character follows,
# because a further digit may arrive. A tag that begins like a speech token is never treated as a
# special token. So a misspelt speech token, such as `<|s_x|>`, raises an error and is not skipped.
_DIGITS = rb"\d{1,%d}" % MAX_DIGITS
_SPEECH = rb"(?:s|speech)_"
_SPECIAL = rb"(?!%s)[^\s|<>]{1,64}" % _SPEECH
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPLETE = re.compile(
    rb"<\|%s(%s)\|>|(%s)(?=[\s,<\xef])|[\s,]+|(<\|%s\|>|%s)"
    % (_SPEECH, _DIGITS, _DIGITS, _SPECIAL, _BYTE_ORDER_MARK)
)
_BEGUN = re.compile(
    rb"<(?:\|(?:%s(?:%s\|?)?|%s\|?)?)?|%s|\xef\xbb?" % (_SPEECH, _DIGITS, _SPECIAL, _DIGITS),
)


class TokenParser:
    """Parser of speech tokens from text: `<|s_123|>`, `<|speech_123|>` and integers.

    The text may arrive in pieces. The tokens do not depend on the positions at which the text is
    split:

        parser = TokenParser()
        parser.feed(b"<|s_1|><|s_2")   # [1]
        parser.feed(b"3|> 7")          # [23]
        parser.close()                 # [7]

    The parser skips white space and commas between tokens. It also skips and counts byte-order
    marks and special tokens of a language model, such as `<|endofprompt|>`. Any other text is an
    error that names the position.

    Attributes:
        skipped: number of special tokens and byte-order marks so far.
        first_skipped: the first skipped token or mark, as messages show it; empty if none was
            skipped.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.first_skipped = ""
        self._rest = b""
        self._offset = 0  # bytes of the text before `_rest`

    def feed(self, text: bytes) -> list[int]:
        """Parses the next piece of text and returns the tokens that are complete with it.

        Raises:
            TokenError: the text is no token; the message names the position in bytes.
        """
        data = self._rest + text
        tokens: list[int] = []
        position = 0
        while match := _COMPLETE.match(data, position):
            if digits := match[1] or match[2]:
                tokens.append(_token(digits, self._offset + position))
            elif special := match[3]:
                if not self.skipped:
                    mark = special == _BYTE_ORDER_MARK
                    self.first_skipped = "a byte-order mark" if mark else _excerpt(special, 80)
                self.skipped += 1
            position = match.end()
        if position < len(data) and not _BEGUN.fullmatch(data, position):
            raise TokenError(
                f"tokens: {_excerpt(data[position:])} at byte {self._offset + position} is "
                f"neither <|s_NUMBER|> nor an integer from 0 to {MAX_TOKEN}"
            )
        self._rest = data[position:]
        self._offset += position
        return tokens

    def close(self) -> list[int]:
        """Ends the text and returns the integer that the end completes, if any. Raises TokenError
        if the text ends within a token.
        """
        rest, self._rest = self._rest, b""
        if not rest:
            return []
        if not rest.isdigit():
            raise TokenError(
                f"tokens: the text ends inside {_excerpt(rest)}, which begins at byte "
                f"{self._offset}"
            )
        return [_token(rest, self._offset)]


def _token(digits: bytes, position: int) -> int:
    token = int(digits)
    if token > MAX_TOKEN:
        raise TokenError(f"tokens: {token} at byte {position} is above {MAX_TOKEN}")
    return token


def _excerpt(text: bytes, length: int = 20) -> str:
    shown = text[:length].decode("ascii", errors="backslashreplace")
    return repr(shown + ("..." if len(text) > length else ""))


def token_input(tokens: TokenArray) -> str:
    """Returns the name of the server's input for tokens, or for latents."""
    return "tokens" if tokens.dtype == np.int32 else LATENTS


def as_tokens(values: npt.ArrayLike) -> TokenArray:
    """Checks tokens and converts them to the array that is sent, with the same shape.

    Args:
        values: integers, shape (tokens,), or (tokens, codebooks) for models with several codes per
            token; or latents, floating-point numbers of shape (tokens, size). They may be empty.

    Returns:
        Tokens as int32, or latents as float32.

    Raises:
        TokenError: the values are not integers, do not have one or two dimensions, or are outside 0
            to 2**31 - 1; or a latent is not finite.
    """
    _refuse_text(values)
    try:
        array = plain_array(values)
    except (TypeError, ValueError, OverflowError) as error:
        uneven = "inhomogeneous" in str(error)
        problem = (
            "rows of different lengths" if uneven else f"expected a list of integers ({error})"
        )
        raise TokenError(f"tokens: {problem}") from None
    if array.ndim not in (1, 2):
        hint = "; pass batches of tokens, such as [7]" if array.ndim == 0 else ""
        raise TokenError(
            f"tokens: shape {array.shape}, expected one dimension, or two for tokens of several "
            f"codes{hint}"
        )
    if array.size == 0:
        latents = array.ndim == 2 and array.dtype.kind == "f"
        return np.zeros((0, *array.shape[1:]), np.float32 if latents else np.int32)
    if array.ndim == 2 and array.dtype.kind == "f":
        return _as_latents(array)
    # NumPy keeps integers of more than 64 bits as Python objects.
    beyond_64_bits = array.dtype.kind == "O" and all(type(value) is int for value in array.flat)
    if array.dtype.kind not in "iu" and not beyond_64_bits:
        hint = "; pass latents in rows, shape (latents, size)" if array.dtype.kind == "f" else ""
        raise TokenError(f"tokens: dtype {array.dtype}, expected integers{hint}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN:
        wrong = low if low < 0 else high
        # Python refuses to print integers of thousands of digits.
        shown = wrong if abs(wrong) < 10**20 else "a number of more than 20 digits"
        raise TokenError(f"tokens: {shown} is outside 0 to {MAX_TOKEN}")
    return array.astype(np.int32)


def plain_array(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Converts values to an array. A bfloat16 of torch or of ml_dtypes becomes float32."""
    if str(getattr(values, "dtype", "")) == "torch.bfloat16":
        values = cast(Any, values).float()
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def as_batches(tokens: Any) -> Iterable[npt.ArrayLike]:
    """Converts tokens to an iterable of batches; a flat array or sequence of integers is one batch.
    Raises TokenError if the tokens are text or not iterable.
    """
    _refuse_text(tokens)
    flat = isinstance(tokens, Sequence) and len(tokens) > 0 and isinstance(tokens[0], Integral)
    if flat or getattr(tokens, "ndim", None) == 1:
        return [tokens]
    if not isinstance(tokens, Iterable):
        raise TokenError(
            f"tokens: {type(tokens).__name__}, expected batches of tokens, such as [[17, 4711]]"
        )
    return tokens


def _refuse_text(values: object) -> None:
    if isinstance(values, (str, bytes)):
        raise TokenError(
            f"tokens: {type(values).__name__}, expected integers; use TokenParser for text"
        )


def _as_latents(array: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        latents = array.astype(np.float32)
    if not np.isfinite(latents).all():
        raise TokenError("latents: hold NaN or infinite values")
    return latents
