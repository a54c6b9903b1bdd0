"""Accumulator of tokens: it collects those of one utterance and cuts the windows of chunks out of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from token2wav.execution.stages import FlowChunk
from token2wav.families.cosyvoice3.config import FlowConfig


class TokenAccumulator:
    """Accumulator of an utterance's tokens, its prompt first. Positions count from the first prompt token.

    Windows are asked for in order, so tokens before the context of the last one are forgotten when room is needed.

    Args:
        prompt_tokens: (P,) int32, or (P, codebooks), as all tokens.
        config: shapes and look-ahead of the flow.
    """

    def __init__(self, prompt_tokens: NDArray[np.int32], config: FlowConfig) -> None:
        self._lookahead = config.lookahead_tokens
        self._lookbehind = config.lookbehind_tokens
        self._tokens = np.empty((2 * len(prompt_tokens) + 4 * config.block_tokens, *config.token_shape), np.int32)
        self._first = 0  # position of `_tokens[0]`
        self._needed = 0  # first position that a later window can ask for
        self.count = 0
        self.append(prompt_tokens)

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Adds tokens that have been checked."""
        count = self.count + len(tokens)
        if count - self._first > len(self._tokens):
            self._make_room(count)
        self._tokens[self.count - self._first : count - self._first] = tokens
        self.count = count

    def covers(self, stop: int) -> bool:
        """Says whether a chunk up to `stop` can run: its tokens are there, and those that it looks ahead to."""
        return self.count >= stop + self._lookahead

    def window(self, start: int, stop: int, *, last: bool) -> FlowChunk:
        """Cuts out tokens `start` to `stop` with their context on both sides; `start` never goes back."""
        left = min(self._lookbehind, start)
        right = 0 if last else self._lookahead
        self._needed = start - left
        window = self._tokens[start - left - self._first : stop + right - self._first].copy()
        return FlowChunk(window, left, start, stop, last)

    def _make_room(self, count: int) -> None:
        """Forgets what is not needed; grows only if the rest would fill more than half."""
        kept = self._tokens[self._needed - self._first : self.count - self._first]
        room = max(len(self._tokens), 2 * (count - self._needed))
        self._tokens = np.empty((room, *kept.shape[1:]), np.int32)
        self._tokens[: len(kept)] = kept
        self._first = self._needed
