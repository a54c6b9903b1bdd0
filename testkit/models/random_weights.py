"""Random weights for networks, the same ones wherever parameters have the same names."""

from __future__ import annotations

import re
import zlib
from typing import TypeVar

import numpy as np
import torch
from torch import nn

SEED = 20

# Second convolutions of DAC's residual units, and its last convolution, in both published formats.
_QUIET_IN_DAC = re.compile(r"conv2\.|\.block\.3\.")

Network = TypeVar("Network", bound=nn.Module)


def fill(network: Network, seed: int = SEED) -> Network:
    """Gives a network random weights, which depend on the seed and on the names and shapes of its
    parameters alone.

    They are such that signals neither vanish nor grow: matrices by the number of their inputs,
    gains and slopes near 1, biases small, F0 below 200 Hz and now and then none, audio within its
    limits. Public code and this project's networks name their parameters alike, so both get the
    same.
    """
    fill_state(network.state_dict(), seed)
    return network.eval().requires_grad_(False)


def fill_state(state: dict[str, torch.Tensor], seed: int = SEED) -> dict[str, torch.Tensor]:
    """Replaces the values of a state dict as `fill` does, and returns it."""
    for name, value in state.items():
        if not value.is_floating_point():
            continue
        numbers = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(
            tuple(value.shape)
        )
        # log-magnitudes of a signal that is not clipped
        if "conv_post" in name and not name.endswith("original1"):
            numbers = 0.2 * (1 + 0.1 * numbers) if value.dim() > 1 else 0.1 * numbers - 1
        elif name.endswith(
            ("original0", "weight_g", "alpha", "cluster_usage", "scale_embed.weight")
        ) or (value.dim() == 1 and name.endswith("weight")):
            numbers = 1 + 0.1 * numbers
        elif "f0_predictor.classifier" in name:  # in Hz: voices, and now and then none
            numbers = (
                100 * numbers / np.sqrt(value.shape[-1]) if value.dim() > 1 else 50 + 0 * numbers
            )
        elif value.dim() == 1 or name.endswith("bias"):
            numbers = 0.1 * numbers
        elif "input_embedding" not in name:
            numbers = numbers / np.sqrt(np.prod(value.shape[1:]))
        value.copy_(torch.from_numpy(numbers))
    return state


def fill_qwen3(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replaces the values of a state dict of a Qwen3 decoder, and returns it. Names are published
    ones.

    The slopes of this decoder are logarithms. With steep slopes and large signals, the decoder
    would magnify rounding errors a million times. So slopes are near 1, and residual units add
    little.
    """
    numbers = (name.split(".")[1] for name in state if name.startswith("decoder."))
    last = f"decoder.{max(map(int, numbers))}."
    for name, value in fill_state(state).items():
        if name.endswith("alpha"):
            value -= 1
        elif "conv2" in name or name.startswith(last):
            value *= 0.25
    return state


def fill_dac(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replaces the values of a state dict of DAC, or of a codec with its decoder, and returns it.
    Names are published ones.

    Residual units add little. Otherwise a dozen of them would make the signal so large that the
    final tanh clips it.
    """
    layers = [int(name.split(".")[2]) for name in state if name.startswith("decoder.model.")]
    last = f"decoder.model.{max(layers, default=0)}."
    for name, value in fill_state(state).items():
        if _QUIET_IN_DAC.search(name) or (layers and name.startswith(last)):
            value *= 0.25
    return state


def fill_omni(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replaces the values of a state dict of the decoder of Qwen2.5-Omni, and returns it. Names are
    published ones, with or without a prefix.

    Attention has a large effect, so that errors of masks are visible. The audio is not clipped.
    """
    plain = {name.removeprefix("token2wav."): value for name, value in state.items()}
    for name, value in fill_state(plain).items():
        if "attn.to_" in name:
            value *= 2
        elif name.endswith("act.alpha"):  # a logarithm
            value -= 1
        elif "conv_post" in name:
            value *= 0.06
    return state
