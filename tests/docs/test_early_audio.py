"""Codecs that hold back less audio than their decoders read ahead: the README names all of them."""

from __future__ import annotations

from benchmarks.family_table import configs
from tests.docs.markdown import ROOT


def test_the_readme_names_the_codecs_with_early_audio() -> None:
    early = {name for name, config in configs() if config.hold_frames}
    assert early == {"DAC 24 kHz", "Higgs Audio", "SNAC"}
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "DAC at 24 and 16 kHz, Higgs Audio, and SNAC at 24 kHz by default hold back" in words
