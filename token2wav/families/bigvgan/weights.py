"""Public BigVGAN checkpoints: their files, and weight norm under any of its names."""

from __future__ import annotations

from pathlib import Path

import torch

from token2wav.errors import CheckpointError
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_KEY = "generator"  # key of the state dict in a public pickle
_LENGTH, _DIRECTION = ".weight_g", ".weight_v"
_NEWER = {
    ".parametrizations.weight.original0": _LENGTH,
    ".parametrizations.weight.original1": _DIRECTION,
}


def read_weights(module: BigVGAN, path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a vocoder in float32, with any weight norm folded in.

    Raises:
        CheckpointError: the file is unreadable, or names and shapes differ from the vocoder.
    """
    state = read_state(path)
    if isinstance(nested := state.get(_KEY), dict):
        state = nested
    return fitting_weights(
        module, _folded(floating_tensors(state, path, _current_name), path), path
    )


def _current_name(name: str) -> str:
    for newer, older in _NEWER.items():
        if name.endswith(newer):
            return name.removesuffix(newer) + older
    return name


def _folded(weights: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Folds weight norm: weight = g * v / ||v||, with the norm over all axes except the first.

    A tensor without its partner keeps its name, and the later check of names rejects it.
    """
    folded = dict(weights)
    for name in weights:
        stem = name.removesuffix(_DIRECTION)
        if stem == name or stem + _LENGTH not in weights:
            continue
        length, direction = folded.pop(stem + _LENGTH).float(), folded.pop(name).float()
        if direction.dim() != 3 or length.shape != (len(direction), 1, 1):
            raise CheckpointError(
                f"{path}: '{stem}{_LENGTH}' has shape {tuple(length.shape)}, which does not "
                f"match '{name}' of {tuple(direction.shape)}"
            )
        if stem + ".weight" in folded:
            raise CheckpointError(
                f"{path}: '{stem}.weight' appears twice, the second time as '{name}'"
            )
        folded[stem + ".weight"] = direction * (length / direction.norm(dim=(1, 2), keepdim=True))
    return folded
