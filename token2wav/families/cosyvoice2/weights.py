"""Weights of CosyVoice models and their relatives: names that checkpoints have, and those of the
parameters here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_BOOKKEEPING = {"epoch", "step"}  # what CosyVoice's trainer stores beside the weights


def read_weights(module: nn.Module, path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Reads the weights of a module from a file in float32; those whose names have another prefix
    are left out.

    Raises:
        CheckpointError: unreadable, or their names and shapes are not those of the module.
    """
    state = {
        name: value for name, value in read_state(path).items() if str(name).startswith(prefix)
    }
    for name in _BOOKKEEPING:
        state.pop(name, None)
    return fitting_weights(module, floating_tensors(state, path, _current_name), path)


def _current_name(name: str) -> str:
    name = name.removeprefix("generator.")  # hift.pt files that come straight from GAN training
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name
