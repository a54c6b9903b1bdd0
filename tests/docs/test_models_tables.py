"""Models on the pages: `docs/models.md` has the table that `scripts.family_table` makes, and README
names the codecs whose streams differ from `synthesize` by default.
"""

from __future__ import annotations

import pytest

from scripts.family_table import configs, row
from tests.docs.markdown import ROOT
from token2wav import StreamConfig

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")


@pytest.mark.slow  # it runs a stream of every flow without arithmetic
def test_families() -> None:
    assert "\n".join([*(row(name, config) for name, config in configs()), ""]) in PAGE


def test_codecs_with_early_audio() -> None:
    """They hold back less audio than their decoders read ahead."""
    codecs = {name for name, config in configs() if config.withheld_frames(StreamConfig())}
    assert codecs == {"DAC 24 kHz", "Higgs Audio", "SNAC"}  # SNAC at 24 kHz
