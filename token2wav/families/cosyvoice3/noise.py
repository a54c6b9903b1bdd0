"""Noise of a CosyVoice3 model: the noise of the public code, or `noise.safetensors` in the model
folder.
"""

from __future__ import annotations

from pathlib import Path

import torch

from token2wav.errors import CheckpointError
from token2wav.families.cosyvoice3 import CosyVoice3Config, FlowConfig
from token2wav.networks.noise import PAGE_FRAMES, FlowNoise, SourceNoise
from token2wav.networks.weights import read_tensor
from token2wav.published.sizes import HiFTConfig

NOISE_FILE = "noise.safetensors"


def load_flow_noise(folder: Path, config: CosyVoice3Config) -> FlowNoise:
    """Loads the noise of the flow. It is the noise of the public code, except where
    `noise.safetensors` replaces its start.
    """
    bands = config.flow.mel_bands
    buffer = _noise(folder, "cfm.rand_noise", (1, bands, -1))
    return FlowNoise(bands, None if buffer is None else buffer[0])


def load_source_noise(folder: Path, config: CosyVoice3Config) -> SourceNoise:
    """Loads the noise of the source of HiFT in the same way as `load_flow_noise`."""
    harmonics = config.vocoder.nb_harmonics + 1
    buffer = _noise(folder, "sinegen.sine_waves", (1, -1, harmonics))
    return SourceNoise(
        harmonics,
        draws_before_source(config.flow, config.vocoder),
        None if buffer is None else buffer[0],
    )


def _noise(folder: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Reads a noise tensor of a folder; None if there is none. -1 in `shape` allows any size."""
    path = folder / NOISE_FILE
    tensor = read_tensor(path, name) if path.is_file() else None
    if tensor is None:
        return None
    if tensor.dim() != len(shape) or any(
        expected not in (-1, size) for size, expected in zip(tensor.shape, shape, strict=True)
    ):
        raise CheckpointError(f"{path}: '{name}' has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype != torch.float32:
        raise CheckpointError(f"{path}: '{name}' has type {tensor.dtype}, expected torch.float32")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: NaN or infinite values in {name}")
    return tensor


def draws_before_source(flow: FlowConfig, hift: HiFTConfig) -> int:
    """Returns how many random numbers the public code draws before the noise of the source.

    The public code seeds all generators with 0 while it builds the flow, and draws the noise of the
    flow. Every layer that is built later consumes as many numbers as it has parameters, in the
    order of `cosyvoice3.yaml`.
    """
    channels = hift.f0_channels
    # (input channels, kernel) of the F0 predictor
    f0_layers = [(hift.in_channels, 4)] + [(channels, 3)] * 4
    return (
        _normal_draws(flow.mel_bands * PAGE_FRAMES)
        + _normal_draws(flow.vocab_size * flow.input_size)
        + (flow.spk_embed_dim + 1) * flow.mel_bands
        + sum((inputs * kernel + 1) * channels for inputs, kernel in f0_layers)
        + (channels + 1)
        + (hift.nb_harmonics + 1)  # rand_ini, which has no effect on the audio
    )


def _normal_draws(count: int) -> int:
    """Returns how many numbers torch draws for `count` normal values. It fills 16 values at a time.
    If `count` is no multiple of 16, it draws the last 16 again.
    """
    return count + (16 if count % 16 else 0)
