"""Published weights of BigVGAN, a vocoder of flow decoders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    fold_weight_norm,
    read_state,
)

_GENERATOR = "generator"  # key of the state dict in a public pickle of BigVGAN


def read_bigvgan_weights(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a BigVGAN in float32, with any weight norm folded in.

    Raises:
        CheckpointError: the file is unreadable, or names and shapes differ from the vocoder.
    """
    state = read_state(path)
    if isinstance(nested := state.get(_GENERATOR), dict):
        state = nested
    return fitting_weights(module, fold_weight_norm(floating_tensors(state, path, str), path), path)
