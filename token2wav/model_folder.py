"""Files of a model folder: the weights of each stage are found here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from token2wav.errors import CheckpointError

Stem = Literal["flow", "hift"]

GENERATOR_FILES = ("generator.safetensors", "bigvgan_generator.pt", "generator.pt")  # of a BigVGAN, as _SUFFIXES
_SUFFIXES = (".safetensors", ".pt")  # in order of preference


def weights_file(folder: Path, stem: Stem) -> Path:
    """Finds the weights of one stage.

    Raises:
        CheckpointError: there are none.
    """
    for suffix in _SUFFIXES:
        if (path := folder / (stem + suffix)).is_file():
            return path
    raise CheckpointError(f"{folder}: neither {stem}.safetensors nor {stem}.pt is there")


def generator_file(folder: Path) -> Path:
    """Finds the weights in a BigVGAN folder.

    Raises:
        CheckpointError: there are none.
    """
    for name in GENERATOR_FILES:
        if (path := folder / name).is_file():
            return path
    raise CheckpointError(f"{folder}: none of {', '.join(GENERATOR_FILES)} is there")
