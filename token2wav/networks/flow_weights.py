"""Published weights of flows and their vocoders, as CosyVoice and BigVGAN name them."""

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

_BOOKKEEPING = {"epoch", "step"}  # values that CosyVoice's trainer stores beside the weights
_GENERATOR = "generator"  # key of the state dict in a public pickle of BigVGAN


def read_cosyvoice_weights(
    module: nn.Module, path: Path, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Reads the weights of a flow or HiFT from a file in float32. Names with another prefix are
    skipped.
    """
    state = read_state(path, (prefix,))
    for name in _BOOKKEEPING:
        state.pop(name, None)
    return fitting_weights(module, floating_tensors(state, path, _current_name), path)


def _current_name(name: str) -> str:
    name = name.removeprefix("generator.")  # in hift.pt files straight from GAN training
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name


def read_bigvgan_weights(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a BigVGAN in float32, with any weight norm folded in."""
    state = read_state(path, wrappers=(_GENERATOR,))
    return fitting_weights(module, fold_weight_norm(floating_tensors(state, path, str), path), path)
