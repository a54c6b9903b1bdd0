"""Alignment of codes that a language model emits in a delay pattern."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from token2wav_client.errors import TokenError
from token2wav_client.tokens import as_tokens


class CodeAligner:
    """Alignment of a stream of codes with a delay pattern, as soon as frames are complete.

    Many language models emit the codes of a frame in several steps: code k of frame t is in row
    t + delays[k]. For 3 codebooks with delays of 0, 1 and 2, the rows of the frames a, b, c are:

        start start start
        a0    start start
        b0    a1    start
        c0    b1    a2       # frame a is complete
        end   c1    b2
        end   end   c2
        end   end   end

        aligner = CodeAligner()
        for row in rows:                          # (8,), or several rows (n, 8)
            utterance.push(aligner.feed(row))
        utterance.finish()

    Rows before the first code of codebook 0 are skipped. The utterance ends at the next mark in
    codebook 0; later frames are not returned. Raises ValueError if there are no delays, the first
    is not 0, or one is negative.

    Args:
        delays: delay of every codebook in rows; the first is 0. The default is the pattern of Higgs
            Audio, 0 to 7. Dia has (0, 8, 9, 10, 11, 12, 13, 14, 15).
        codebook_size: codes in a codebook. This number and all above it are marks, such as start
            and end. A mark inside a frame becomes the highest code, as in the public code.
    """

    def __init__(self, delays: Sequence[int] = range(8), *, codebook_size: int = 1024) -> None:
        if not len(delays) or delays[0] or min(delays) < 0:
            raise ValueError(f"delays: {list(delays)}; the first must be 0, and none negative")
        self._delays, self._size = tuple(delays), codebook_size
        self._rows = np.zeros((0, len(delays)), np.int32)  # rows of incomplete frames
        self._started = False
        self._frames_left: int | None = None  # until the end; None before its mark

    @property
    def ended(self) -> bool:
        """Whether the mark of the end has arrived, and all frames before it were returned."""
        return self._frames_left == 0

    def feed(self, rows: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Takes the next rows, and returns the frames that they complete. Raises TokenError if the
        rows have another shape, or are not integers of at least 0.

        Args:
            rows: codes of one row (codebooks,), or of several (n, codebooks).

        Returns:
            (frames, codebooks) aligned codes, often none.
        """
        new_rows = as_tokens(rows)
        new_rows = new_rows[None] if new_rows.ndim == 1 and new_rows.size else new_rows
        codebooks = len(self._delays)
        if not new_rows.size:
            new_rows = self._rows[:0]
        if new_rows.shape[1] != codebooks or new_rows.dtype != np.int32:
            raise TokenError(
                f"tokens: shape {new_rows.shape} of {new_rows.dtype}, expected rows of "
                f"{codebooks} codes"
            )
        if not self._started:
            code_rows = np.flatnonzero(new_rows[:, 0] < self._size)
            new_rows = new_rows[code_rows[0] :] if code_rows.size else new_rows[:0]
            self._started = bool(code_rows.size)
        return self._complete(np.concatenate((self._rows, new_rows)).astype(np.int32))

    def _complete(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the complete frames in rows, which begin with the first frame, and keeps the
        other rows.
        """
        if self._frames_left is None:
            marks = np.flatnonzero(rows[:, 0] >= self._size)
            self._frames_left = int(marks[0]) if marks.size else None
        frames = max(0, len(rows) - max(self._delays))
        if self._frames_left is not None:
            frames = min(frames, self._frames_left)
            self._frames_left -= frames
        self._rows = rows[:0] if self.ended else rows[frames:]
        codes = [rows[delay : delay + frames, k] for k, delay in enumerate(self._delays)]
        return np.minimum(np.stack(codes, axis=1), self._size - 1)
