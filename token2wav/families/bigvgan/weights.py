"""Public BigVGAN checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from token2wav.families.bigvgan.network import BigVGAN
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    fold_weight_norm,
    read_state,
)

_KEY = "generator"  # key of the state dict in a public pickle


def read_weights(module: BigVGAN, path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a vocoder in float32, with any weight norm folded in.

    Raises:
        CheckpointError: the file is unreadable, or names and shapes differ from the vocoder.
    """
    state = read_state(path)
    if isinstance(nested := state.get(_KEY), dict):
        state = nested
    return fitting_weights(module, fold_weight_norm(floating_tensors(state, path, str), path), path)
