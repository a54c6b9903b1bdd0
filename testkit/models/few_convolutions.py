"""Model folders with few convolutions in the vocoder, because an export takes longer with more
operations.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from testkit.models.golden import TINY
from testkit.models.random_weights import fill
from testkit.models.yaml_edits import edit_text
from token2wav.networks.hift import HiFT
from token2wav.published.registry import read_config

_FEWER = (
    ("    resblock_kernel_sizes", "[3, 7, 11]", "[3]"),
    ("    resblock_dilation_sizes", "[[1, 3, 5], [1, 3, 5], [1, 3, 5]]", "[[1]]"),
    ("source_resblock_dilation_sizes", "[[1, 3, 5], [1, 3, 5], [1, 3, 5]]", "[[1], [1], [1]]"),
)


def with_few_convolutions(config: Path) -> Path:
    """Removes convolutions from the vocoder of a model folder, and gives it random weights.

    Args:
        config: YAML file of the folder.
    """
    changes = ((f"{key}: {published}", f"{key}: {fewer}") for key, published, fewer in _FEWER)
    edit_text(config, *changes)
    folder = config.parent
    model: Any = read_config(folder)
    (folder / "hift.safetensors").unlink(missing_ok=True)
    torch.save(fill(HiFT(model.vocoder)).state_dict(), folder / "hift.pt")
    return folder


def a_tiny_model(folder: Path) -> Path:
    """Writes the tiny CosyVoice3 with few convolutions in its vocoder."""
    for name in ("cosyvoice3.yaml", "flow.safetensors"):
        shutil.copy(TINY / name, folder)
    return with_few_convolutions(folder / "cosyvoice3.yaml")
