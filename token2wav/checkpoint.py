"""Model folders to modules: `flow.pt`, `hift.pt` or the same as `.safetensors`, and the noise a model was built with.

Files are read and compared with the modules in `weights.py`; nothing in a checkpoint is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.flow.flow import Flow
from token2wav.flow.noise import FlowNoise
from token2wav.model_config import ModelConfig
from token2wav.model_folder import Stem, weights_file
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.noise import SourceNoise, draws_before_source
from token2wav.weights import fill, fitting_weights, floating_tensors, read_state

NOISE_FILE = "noise.safetensors"
_BOOKKEEPING = {"epoch", "step"}  # what CosyVoice's trainer stores beside the weights

_Module = TypeVar("_Module", bound=nn.Module)


def load_flow(folder: Path, config: ModelConfig) -> Flow:
    """The flow of a model folder in float32 on the CPU, ready for inference.

    Raises:
        CheckpointError: no file, unreadable, or its parameters are not those of the configuration.
    """
    with torch.device("meta"):
        module = Flow(config.flow)
    return _filled(module, weights_file(folder, "flow")).eval().requires_grad_(False)


def load_hift(folder: Path, config: ModelConfig) -> HiFT:
    """The vocoder of a model folder, as `load_flow`."""
    with torch.device("meta"):
        module = HiFT(config.hift)
    module = _filled(module, weights_file(folder, "hift"))
    module.freeze()
    return module


def load_noise(folder: Path, config: ModelConfig) -> tuple[FlowNoise, SourceNoise]:
    """Noise of the flow and of the source: `noise.safetensors` where the folder has it, then what a stock model draws.

    Raises:
        CheckpointError: the file is unreadable or its tensors have other shapes than the model's.
    """
    bands, harmonics = config.flow.mel_bands, config.hift.nb_harmonics + 1
    flow = source = None
    path = folder / NOISE_FILE
    if path.is_file():
        tensors = read_state(path)
        if (buffer := tensors.get("cfm.rand_noise")) is not None:
            flow = _shaped(buffer, (1, bands, -1), path, "cfm.rand_noise", torch.float32)[0]
        if (buffer := tensors.get("sinegen.sine_waves")) is not None:
            source = _shaped(buffer, (1, -1, harmonics), path, "sinegen.sine_waves", torch.float32)[0]
        elif (buffer := tensors.get("sinegen.sine_waves_u24")) is not None:
            source = _shaped(buffer, (-1, harmonics, 3), path, "sinegen.sine_waves_u24", torch.uint8)
    return (
        FlowNoise(bands, flow),
        SourceNoise(harmonics, draws_before_source(config.flow, config.hift), source),
    )


def check_model_folder(folder: Path) -> None:
    """Reads configuration and weights of a folder without building anything on a device.

    Raises:
        Token2WavError: the folder cannot be served, and why.
    """
    config = ModelConfig.read(folder)
    modules: dict[Stem, nn.Module]
    with torch.device("meta"):
        modules = {"flow": Flow(config.flow), "hift": HiFT(config.hift)}
    files = {stem: weights_file(folder, stem) for stem in modules}
    for stem, module in modules.items():
        _checked(module, files[stem])
    load_noise(folder, config)


def _current_name(name: str) -> str:
    name = name.removeprefix("generator.")  # hift.pt files that come straight from GAN training
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name


def _checked(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in read_state(path).items() if name not in _BOOKKEEPING}
    return fitting_weights(module, floating_tensors(state, path, _current_name), path)


def _filled(module: _Module, path: Path) -> _Module:
    fill(module, _checked(module, path))
    return module


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...], path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    fits = tensor.dim() == len(shape) and all(
        want in (-1, have) for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise CheckpointError(f"{path}: '{name}' has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype != dtype:
        raise CheckpointError(f"{path}: '{name}' has type {tensor.dtype}, expected {dtype}")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: NaN or infinite values in {name}")
    return tensor
