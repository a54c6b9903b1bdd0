"""Codes of the causal DAC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from token2wav import InputError
from token2wav.published.registry import read_config


def test_codes_are_bounded_by_their_codebook(tmp_path: Path) -> None:
    """The public code replaces a code above 1023 in the residual codebooks by 1023."""
    (tmp_path / "codec.pth").touch()
    config = read_config(tmp_path)
    largest = np.array([[4095] + 9 * [1023]])
    np.testing.assert_array_equal(config.tokens.checked(largest), largest)
    for codebook, bound in ((0, 4095), (1, 1023), (9, 1023)):
        codes = largest.copy()
        codes[0, codebook] += 1
        message = (
            f"^tokens: {bound + 1} at index 0, codebook {codebook}, is outside the "
            f"vocabulary 0 to {bound}$"
        )
        with pytest.raises(InputError, match=message):
            config.tokens.checked(codes)
