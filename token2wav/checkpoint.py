"""Model folders to modules: `flow.pt`, `hift.pt` or the same as `.safetensors`, and the noise a model was built with.

Nothing in a checkpoint is executed: pickles are read with `weights_only=True`. All names and shapes are compared before
a tensor is used, and everything that does not fit is listed in one error.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.flow.flow import Flow
from token2wav.flow.noise import FlowNoise
from token2wav.model_config import ModelConfig
from token2wav.model_folder import Stem, weights_file
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.noise import SourceNoise, draws_before_source

NOISE_FILE = "noise.safetensors"
_LISTED = 8  # names per kind in an error
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
        tensors = _read(path)
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


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on odd pickle protocols; what cannot be read is an error anyway
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        asked_for = re.search(r"GLOBAL (\S+)", str(error))  # the rest of torch's text says how to execute it
        reason = f"it asks for '{asked_for.group(1)}'" if asked_for else "it is no pickle of tensors"
        raise CheckpointError(f"{path}: refused, nothing was executed: {reason}") from error
    except Exception as error:  # a damaged pickle makes torch raise almost anything
        raise CheckpointError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a state dict, got {type(state).__name__}")
    return state


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """The state dict under the names that the modules of this project have."""
    weights = {}
    for name, value in _read(path).items():
        if name in _BOOKKEEPING:
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: '{name}' is a {type(value).__name__}, not a tensor")
        if not value.is_floating_point():
            raise CheckpointError(f"{path}: '{name}' has type {value.dtype}, expected floating point")
        current = _current_name(str(name))
        if current in weights:
            raise CheckpointError(f"{path}: '{current}' is there twice, the second time as '{name}'")
        weights[current] = value
    return weights


def _current_name(name: str) -> str:
    name = name.removeprefix("generator.")  # hift.pt files that come straight from GAN training
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name


def _compare(module: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "wrongly shaped": [
            f"{name} {found[name]} instead of {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
    }
    if any(problems.values()):
        lists = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names]
        raise CheckpointError(f"{path}: parameters do not fit the configuration; {'; '.join(lists)}")


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _checked(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """The weights of a module in float32, after everything that can be wrong with them has been looked for."""
    weights = _weights(path)
    _compare(module, weights, path)
    weights = {name: value.float() for name, value in weights.items()}
    broken = [name for name, value in weights.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(f"{path}: NaN or infinite values in {_listed(broken)}")
    return weights


def _filled(module: _Module, path: Path) -> _Module:
    # Copied, because what was read is a view of the file, and models are replaced under running servers.
    module.load_state_dict({name: value.clone() for name, value in _checked(module, path).items()}, assign=True)
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
