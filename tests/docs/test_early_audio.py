"""Codecs that hold back less audio than their decoders read ahead.

README and `docs/models.md` name them, because their streams differ from `synthesize` by default.
"""

from __future__ import annotations

from scripts.family_table import configs
from token2wav import StreamConfig


def test_codecs_with_early_audio() -> None:
    codecs = {name for name, config in configs() if config.withheld_frames(StreamConfig())}
    assert codecs == {"DAC 24 kHz", "Higgs Audio", "SNAC"}  # SNAC at 24 kHz
