"""Frames of a codec with several codebooks, from the numbers that a language model sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

_UNKNOWN_SIZE = int(np.iinfo(np.int32).max)
_NO_CODE = -1  # keeps the place of a number outside the vocabulary


class Frames:
    """Frames whose codes arrive one after the other. A token is a frame of one code.

    A frame that lacks a code is left out. If the numbers contain the place of their code, the next
    frame begins with the next code of the first codebook, and a doubled code is left out alone.
    Otherwise a number outside the vocabulary spoils its frame, and keeps its place in it.

    Args:
        codebooks: number of codes of a frame.
        codebook_offset: difference between the numbers of equal codes in neighbouring codebooks,
            which gives the place of a code; 0 if the numbers of all codebooks begin at 0.
        vocabulary: number of different codes in each codebook; () if it is unknown.

    Attributes:
        skipped: numbers that are in no frame: `outside` the vocabulary, or part of a `frame` that
            lacks a code.
    """

    def __init__(self, codebooks: int, codebook_offset: int, vocabulary: Sequence[int]) -> None:
        unknown = [_UNKNOWN_SIZE] * (codebooks - len(vocabulary))
        self._sizes = [*vocabulary[:codebooks], *unknown]
        self._step = codebook_offset if codebooks > 1 else 0
        self._frame: list[int] = []
        self.skipped: Counter[str] = Counter()

    def add(self, number: int) -> list[int] | None:
        """Adds a number, and returns the frame that it completes; None if it completes none."""
        here = len(self._frame)
        place, code = divmod(number, self._step) if self._step else (here, number)
        if not (0 <= place < len(self._sizes) and 0 <= code < self._sizes[place]):
            self.skipped["outside"] += 1
            if self._step:
                return None
            code = _NO_CODE
        if 0 < place < here:  # this frame has such a code already
            self.skipped["frame"] += 1
            return None
        if place != here:
            self._leave_out()
            if place:  # codes before this one are lost
                self.skipped["frame"] += 1
                return None
        self._frame.append(code)
        if len(self._frame) < len(self._sizes):
            return None
        if _NO_CODE in self._frame:
            self._leave_out()
            return None
        frame, self._frame = self._frame, []
        return frame

    def _leave_out(self) -> None:
        self.skipped["frame"] += sum(code != _NO_CODE for code in self._frame)
        self._frame = []
