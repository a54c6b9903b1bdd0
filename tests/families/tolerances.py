"""Tolerance of codecs."""

from __future__ import annotations

# Of the spread of the audio. Sums are in another order than in the public code, and their order
# differs between processors: 1.4e-5 was seen on an AMD EPYC.
PARITY = 2e-5
