"""Which tokens: collects the tokens of one utterance and cuts windows out of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from token2wav.engines.base import FlowChunk
from token2wav.model_config import FlowConfig


class TokenAccumulator:
    """Tokens of an utterance, its prompt first. Positions count from the first prompt token.

    Args:
        prompt_tokens: (P,) int32.
        config: of the flow.
    """

    def __init__(self, prompt_tokens: NDArray[np.int32], config: FlowConfig) -> None:
        self._lookahead = config.pre_lookahead_len
        self._lookbehind = config.lookbehind_len
        self._tokens = np.empty(2 * len(prompt_tokens) + 4 * config.block_tokens, np.int32)
        self.count = 0
        self.append(prompt_tokens)

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Adds tokens that have been checked."""
        count = self.count + len(tokens)
        if count > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * count)
        self._tokens[self.count : count] = tokens
        self.count = count

    def covers(self, stop: int) -> bool:
        """Whether a chunk that ends at `stop` can run: its tokens are there, and those that it looks ahead to."""
        return self.count >= stop + self._lookahead

    def window(self, start: int, stop: int, *, last: bool) -> FlowChunk:
        """The chunk of tokens `start` to `stop` with its context on both sides."""
        left = min(self._lookbehind, start)
        right = 0 if last else self._lookahead
        return FlowChunk(self._tokens[start - left : stop + right].copy(), left, start, stop, last)
