"""Folders of Step-Audio2's decoder as they are published, at the sizes of golden sets and with
their weights.
"""

from __future__ import annotations

from pathlib import Path

from testkit.models.cosyvoice2_model import write_weights
from testkit.models.family_golden import FamilyGolden
from testkit.models.yaml_edits import published_text
from token2wav.families.stepaudio2 import read
from token2wav.families.stepaudio2.flow import stepaudio2_flow
from token2wav.networks.hift import HiFT


def write_yaml(folder: Path, golden: FamilyGolden, *, hift: bool = True) -> Path:
    """Writes the model file for the sizes of a golden set.

    Args:
        hift: whether the vocoder is described, as CosyVoice2's is. Public code has the published
            sizes in itself.
    """
    path = folder / "flow.yaml"
    _, _, vocoder = published_text("cosyvoice2.yaml", golden).partition("\nhift:")
    text = published_text("stepaudio2.yaml", golden)
    path.write_text(f"{text}\nhift:{vocoder}" if hift else text)
    return path


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes such a model with the weights of the golden set, and returns its folder."""
    config = read(write_yaml(folder, golden).parent)
    return write_weights(folder, stepaudio2_flow(config.flow), HiFT(config.vocoder))
