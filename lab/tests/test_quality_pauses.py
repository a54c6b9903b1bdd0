"""Pauses of speech: runs and silences that are counted."""

from __future__ import annotations

import numpy as np
import pytest

from lab.quality import quality_pauses


@pytest.mark.parametrize(
    ("tokens", "run"), [([5], 1), ([5, 5, 6, 6, 6], 3), ([1, 2, 1, 2], 1), ([7] * 9, 9)]
)
def test_longest_run(tokens: list[int], run: int) -> None:
    rows = np.array(tokens, np.int32)
    assert quality_pauses.longest_run(rows) == run
    assert quality_pauses.longest_run(np.stack((np.zeros_like(rows), rows), axis=1)) == run


def test_the_longest_pause_lies_between_sounds() -> None:
    sound, silence = np.full(2400, 0.1, np.float32), np.zeros(24_000, np.float32)
    audio = np.concatenate((silence, sound, silence[:4800], sound, silence[:7200], sound, silence))
    assert quality_pauses.longest_pause_s(audio, 24_000) == pytest.approx(0.3)
    assert quality_pauses.longest_pause_s(silence, 24_000) == 0
