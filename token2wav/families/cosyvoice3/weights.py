"""Checkpoints of a model folder: `flow` and `hift`, as `.pt` or `.safetensors`, and noise are loaded into modules.

Files are read and compared with the modules in `weights.py`; nothing in a checkpoint is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.families.bigvgan.weights import load_bigvgan, read_generator
from token2wav.families.cosyvoice3.config import CosyVoice3Config, FlowConfig
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.configs import HiFTConfig
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import PAGE_FRAMES, FlowNoise, SourceNoise
from token2wav.networks.weights import Blank, fill, fitting_weights, floating_tensors, read_state, read_tensor

NOISE_FILE = "noise.safetensors"
_BOOKKEEPING = {"epoch", "step"}  # what CosyVoice's trainer stores beside the weights

_Module = TypeVar("_Module", bound=nn.Module)


def load_flow(folder: Path, config: CosyVoice3Config) -> Flow:
    """Loads the flow of a model folder in float32 on the CPU, ready for inference.

    Raises:
        CheckpointError: no file, unreadable, or its parameters are not those of the configuration.
    """
    with Blank():
        module = Flow(config.flow)
    return filled(module, config.weights_file(folder, "flow")).eval().requires_grad_(False)


def load_hift(folder: Path, config: CosyVoice3Config) -> HiFT:
    """Loads the vocoder of a model folder with HiFT, as `load_flow` does."""
    with Blank():
        module = HiFT(config.hift)
    module = filled(module, config.weights_file(folder, "hift"))
    module.freeze()
    return module


def load_vocoder(folder: Path, config: CosyVoice3Config) -> HiFT | BigVGAN:
    """Loads the vocoder of a model folder, as `load_flow` does."""
    if isinstance(config.vocoder, HiFTConfig):
        return load_hift(folder, config)
    return load_bigvgan(folder / config.vocoder_folder)


def load_flow_noise(folder: Path, config: CosyVoice3Config) -> FlowNoise:
    """Loads the flow's noise: `noise.safetensors` where the folder has it, then what a stock model draws.

    Raises:
        CheckpointError: the file is unreadable or its tensors have other shapes than the model's.
    """
    bands = config.flow.mel_bands
    buffer = _noise(folder, "cfm.rand_noise", (1, bands, -1))
    return FlowNoise(bands, None if buffer is None else buffer[0])


def load_source_noise(folder: Path, config: CosyVoice3Config) -> SourceNoise:
    """Loads the noise of HiFT's source, as `load_flow_noise` does."""
    harmonics = config.hift.nb_harmonics + 1
    buffer = _noise(folder, "sinegen.sine_waves", (1, -1, harmonics))
    packed = None if buffer is not None else _noise(folder, "sinegen.sine_waves_u24", (-1, harmonics, 3), torch.uint8)
    return SourceNoise(
        harmonics, draws_before_source(config.flow, config.hift), packed if buffer is None else buffer[0]
    )


def check(folder: Path, config: CosyVoice3Config) -> None:
    """Reads the weights of a folder without building anything on a device.

    Raises:
        CheckpointError: the folder cannot be served, and why.
    """
    with Blank():
        flow, vocoder = modules(config)
    flow_file, vocoder_file = config.weights_file(folder, "flow"), config.weights_file(folder, "hift")
    checked(flow, flow_file)
    if isinstance(vocoder, BigVGAN):
        fitting_weights(vocoder, *read_generator(vocoder_file.parent))
    else:
        checked(vocoder, vocoder_file)
        load_source_noise(folder, config)
    load_flow_noise(folder, config)


def modules(config: CosyVoice3Config) -> tuple[Flow, HiFT | BigVGAN]:
    """Builds flow and vocoder of a model, without weights of a folder."""
    vocoder = config.vocoder
    return Flow(config.flow), HiFT(vocoder) if isinstance(vocoder, HiFTConfig) else BigVGAN(vocoder)


def current_name(name: str) -> str:
    """Returns the name that a parameter has here."""
    name = name.removeprefix("generator.")  # hift.pt files that come straight from GAN training
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name


def checked(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Reads weights that have the names and shapes of a module's parameters.

    Raises:
        CheckpointError: unreadable, or others.
    """
    state = {name: value for name, value in read_state(path).items() if name not in _BOOKKEEPING}
    return fitting_weights(module, floating_tensors(state, path, current_name), path)


def filled(module: _Module, path: Path) -> _Module:
    """Puts weights into a module, see `checked`, and returns it."""
    fill(module, checked(module, path))
    return module


def _noise(folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """Reads a tensor of a folder's noise, None where there is none; -1 in its shape stands for any size."""
    path = folder / NOISE_FILE
    tensor = read_tensor(path, name) if path.is_file() else None
    if tensor is None:
        return None
    if tensor.dim() != len(shape) or any(
        want not in (-1, have) for have, want in zip(tensor.shape, shape, strict=True)
    ):
        raise CheckpointError(f"{path}: '{name}' has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype != dtype:
        raise CheckpointError(f"{path}: '{name}' has type {tensor.dtype}, expected {dtype}")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: NaN or infinite values in {name}")
    return tensor


def draws_before_source(flow: FlowConfig, hift: HiFTConfig) -> int:
    """Random numbers that a stock deployment has drawn when it comes to the source's noise.

    The public code seeds all generators with 0 while it builds the flow and draws the flow's noise; every layer that
    is built after it then consumes as many numbers as it has parameters, in the order of `cosyvoice3.yaml`.
    """
    channels = hift.f0_channels
    f0_layers = [(hift.in_channels, 4)] + [(channels, 3)] * 4  # (input channels, kernel) of the F0 predictor
    return (
        _normal_draws(flow.mel_bands * PAGE_FRAMES)
        + _normal_draws(flow.vocab_size * flow.input_size)
        + (flow.spk_embed_dim + 1) * flow.mel_bands
        + sum((inputs * kernel + 1) * channels for inputs, kernel in f0_layers)
        + (channels + 1)
        + (hift.nb_harmonics + 1)  # rand_ini, which has no effect on the audio
    )


def _normal_draws(count: int) -> int:
    """torch fills a normal tensor 16 values at a time and draws the last 16 again if they don't come out even."""
    return count + (16 if count % 16 else 0)
