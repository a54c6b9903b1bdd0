"""Tokens of a stream: their checks, and the buffer from which chunks are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.errors import InputError
from token2wav.voice import check_vocabulary, latent_array, token_array

NO_CODE = -1  # code of a codebook that a stream does not send


class TokenBuffer:
    """Buffer of a stream's tokens, at first those of the prompt: (P,) int32, or (P, codebooks).

    Positions count from the first prompt token.
    """

    def __init__(self, prompt_tokens: NDArray[np.int32], config: ModelConfig) -> None:
        self.received = 0  # position after the last token that was added
        self._fewer_codebooks = config.fewer_codebooks
        self._codebooks = 0  # codebooks of the first tokens; 0 before them
        self._first = 0  # position of `_tokens[0]`
        room = 2 * len(prompt_tokens) + 4 * config.block_tokens
        self._tokens = np.empty((room, *config.token_shape), config.token_dtype)
        self._append(prompt_tokens, needed=0)

    def add(self, tokens: NDArray[Any], needed: int) -> None:
        """Adds tokens (n, *token_shape), checked by `checked_tokens`.

        Args:
            needed: position before which no later chunk needs a token. If the buffer is full, these
                tokens are removed.
        """
        if self._fewer_codebooks and len(tokens):
            self.check_codebooks(tokens)
            self._codebooks = _codebooks(tokens)
        self._append(tokens, needed)

    def check_codebooks(self, tokens: NDArray[Any]) -> None:
        """Raises InputError if tokens have another number of codebooks than the first tokens."""
        if self._codebooks and len(tokens) and _codebooks(tokens) != self._codebooks:
            raise InputError(
                "tokens",
                f"{_codebooks(tokens)} codebooks, but the stream began with {self._codebooks}",
            )

    def copy(self, start: int, stop: int) -> NDArray[Any]:
        return self._tokens[start - self._first : stop - self._first].copy()

    def _append(self, tokens: NDArray[Any], needed: int) -> None:
        count = self.received + len(tokens)
        if count - self._first > len(self._tokens):
            self._make_room(count, needed)
        self._tokens[self.received - self._first : count - self._first] = tokens
        self.received = count

    def _make_room(self, count: int, needed: int) -> None:
        # The buffer becomes larger only if the needed tokens would fill more than half of it.
        moved = self._tokens[needed - self._first : self.received - self._first]
        room = max(len(self._tokens), 2 * (count - needed))
        self._tokens = np.empty((room, *moved.shape[1:]), moved.dtype)
        self._tokens[: len(moved)] = moved
        self._first = needed


def _codebooks(tokens: NDArray[Any]) -> int:
    """Returns the number of codebooks of the first token, which is that of all tokens."""
    return int((tokens[0] != NO_CODE).sum())


def checked_tokens(tokens: ArrayLike, config: ModelConfig) -> NDArray[Any]:
    """Converts tokens to the type of the model, and checks them. No later step checks them again.

    Args:
        tokens: (n,) integers, or (n, codebooks); or (n, size) numbers if the model takes latents.

    Returns:
        (n, *token_shape) int32, with `NO_CODE` in the codebooks that a stream does not send; or
        float32 latents.

    Raises:
        InputError: the tokens have another shape, are not integers, or are outside the vocabulary;
            or the latents have another shape, or contain NaN or infinity.
    """
    if config.takes_latents:
        return latent_array(tokens, *config.token_shape)
    if not config.fewer_codebooks:
        array = token_array("tokens", tokens, config.token_shape)
        check_vocabulary("tokens", array, config.vocabulary)
        return array
    [codebooks] = config.token_shape
    array = token_array("tokens", tokens, None)
    if not array.size and array.ndim == 1:
        array = array.reshape(0, codebooks)
    if array.ndim != 2 or not 1 <= array.shape[1] <= codebooks:
        raise InputError(
            "tokens",
            f"shape {array.shape}, expected (tokens, codebooks) with 1 to {codebooks} codebooks",
        )
    check_vocabulary("tokens", array, config.vocab_size)
    if array.shape[1] == codebooks:
        return array
    absent = codebooks - array.shape[1]
    return np.pad(array, ((0, 0), (0, absent)), constant_values=NO_CODE)
