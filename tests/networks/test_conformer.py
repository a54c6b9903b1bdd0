"""Conformer encoder: its table of distances. `test_public_estimators.py` compares the encoder with
its public code, and `tests/families/test_streams.py` its chunks with the whole.
"""

from __future__ import annotations

import torch

from testkit.models.random_weights import fill
from token2wav.networks.conformer import RelativeAttention


def test_the_table_of_distances_grows_at_both_ends() -> None:
    """A short chunk late in a stream comes before a long one early in another stream."""
    attention = fill(RelativeAttention(16, heads=2))
    for nearest, farthest in ((-4, 9), (-4, 100), (-30, 30), (-300, 5)):
        expected = attention._project(farthest, nearest)
        torch.testing.assert_close(attention._projected(nearest, farthest), expected)
