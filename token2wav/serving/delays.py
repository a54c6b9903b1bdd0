"""Alignment of codes that a language model emits in a delay pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config.arrays import token_array
from token2wav.config.model_config import ModelConfig
from token2wav.errors import InputError

_LONGEST_DELAY = 100  # rows; bounds the memory of a stream


class DelayPattern:
    """Alignment of the codes of one stream. Code k of a frame arrives `delays[k]` rows after the
    first code of the frame.

    Codes beyond the vocabulary are marks of start and end. Rows before the first code of codebook 0
    are skipped, and frames from the next mark in codebook 0 on are dropped. The mark does not end
    the utterance. A mark inside a frame becomes the highest code. The client has the same alignment
    (`CodeAligner`).

    Raises:
        InputError: a token of the model has no codebooks or another number of codebooks, a delay is
            no integer or out of range, or the first delay is not 0.
    """

    def __init__(self, delays: Sequence[int], config: ModelConfig) -> None:
        tokens, most = config.tokens, config.tokens.codebooks
        if not most:
            raise InputError("delays", "given, but a token of this model has no codebooks")
        delays = token_array("delays", delays).tolist()
        if len(delays) != most and not (tokens.fewer_codebooks and 1 <= len(delays) < most):
            expected = f"1 to {most}" if tokens.fewer_codebooks else most
            raise InputError(
                "delays", f"{len(delays)} given, but the model has {expected} codebooks"
            )
        if delays[0] or not 0 <= min(delays) <= max(delays) <= _LONGEST_DELAY:
            raise InputError(
                "delays",
                f"{', '.join(map(str, delays))}; the first must be 0, and all between 0 and "
                f"{_LONGEST_DELAY}",
            )
        self._delays, self._size = tuple(delays), tokens.codebook_sizes[0]
        self._highest = np.array(tokens.codebook_sizes[: len(delays)]) - 1
        self._rows = np.zeros((0, len(delays)), np.int32)  # rows of incomplete frames
        self._started = self._ended = False

    def frames(self, rows: ArrayLike) -> NDArray[Any]:
        """Takes the next rows (n, codebooks), and returns the frames (m, codebooks) that they
        complete. Raises InputError if the rows have another shape, or are not integers of at least
        0.
        """
        new_rows = token_array("tokens", rows, (len(self._delays),))
        if new_rows.size and new_rows.min() < 0:
            raise InputError("tokens", f"{new_rows.min()} is below 0")
        if not self._started:
            codes = np.flatnonzero(new_rows[:, 0] < self._size)
            new_rows = new_rows[codes[0] :] if codes.size else new_rows[:0]
            self._started = bool(codes.size)
        rows = np.concatenate((self._rows, new_rows))
        count = max(0, len(rows) - max(self._delays))
        marks = np.flatnonzero(rows[:count, 0] >= self._size)
        if marks.size or self._ended:
            count, self._ended = 0 if self._ended else int(marks[0]), True
        self._rows = rows[:0] if self._ended else rows[count:]
        codes_of = [rows[delay : delay + count, k] for k, delay in enumerate(self._delays)]
        return np.minimum(np.stack(codes_of, axis=1), self._highest)
