"""Folders of CosyVoice2 and MOSS-Speech models as they are published, at the sizes of golden sets
and with their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from testkit.models.yaml_edits import edit_text, published_text
from token2wav.families.cosyvoice2 import read
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.networks.hift import HiFT


def write_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file for the sizes of a golden set."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cosyvoice2.yaml"
    path.write_text(published_text("cosyvoice2.yaml", golden))
    return path


def write_moss_speech_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file of MOSS-Speech for the sizes of a golden set."""
    return edit_text(
        write_yaml(folder, golden),
        ("token_frame_rate: 25", "token_frame_rate: 12.5"),
        ("token_mel_ratio: 2", "token_mel_ratio: 4"),
        ("chunk_size: 25", "chunk_size: 5"),
        ("vocab_size: 6561", "vocab_size: 20480"),
        ("        use_cnn_module", "        upsample_stride: 4\n        use_cnn_module"),
        name="config.yaml",
    )


def write_model(
    folder: Path,
    golden: FamilyGolden,
    write_file: Callable[[Path, FamilyGolden], Path] = write_yaml,
) -> Path:
    """Writes a model with the weights of a golden set, and returns its folder."""
    config = read(write_file(folder, golden).parent)
    return write_weights(folder, cosyvoice2_flow(config.flow), HiFT(config.vocoder))


def write_moss_speech(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model of MOSS-Speech with the weights of a golden set, and returns its folder."""
    write_model(folder, golden, write_moss_speech_yaml)
    return (folder / "flow.pt").rename(folder / "flow-chunk-5.pt").parent


def write_weights(folder: Path, flow: nn.Module, hift: HiFT) -> Path:
    """Writes weights as a golden set has them, and returns their folder."""
    torch.save(fill(flow).state_dict(), folder / "flow.pt")
    vocoder = {f"generator.{name}": value for name, value in fill(hift).state_dict().items()}
    torch.save(vocoder, folder / "hift.pt")
    return folder
