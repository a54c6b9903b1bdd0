"""Buffer of the tokens of a stream, from which chunks are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import NO_CODE
from token2wav.errors import InputError


class TokenBuffer:
    """Buffer of a stream's tokens, at first those of the prompt: (P,) int32, or (P, codebooks).

    Positions count from the first prompt token.
    """

    def __init__(self, prompt_tokens: NDArray[np.int32], config: ModelConfig) -> None:
        self.received = 0  # position after the last token that was added
        self._fewer_codebooks = config.tokens.fewer_codebooks
        self._codebooks = 0  # codebooks of the first tokens; 0 before them
        self._first = 0  # position of `_tokens[0]`
        room = 2 * len(prompt_tokens) + 4 * config.block_tokens
        self._tokens = config.tokens.zeros(room)
        self._append(prompt_tokens, needed=0)

    def add(self, tokens: NDArray[Any], needed: int) -> None:
        """Adds tokens (n, *token_shape), checked by `TokenFormat.checked`.

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
