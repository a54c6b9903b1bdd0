"""Configuration of a BigVGAN vocoder, typed and frozen, which is read from its public `config.json` as data.

It is validated here, once, before any weight is read; the rest of the code trusts it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from token2wav.config.values import from_mapping
from token2wav.errors import CheckpointError, ConfigError
from token2wav.networks.configs import BigVGANConfig, MelSettings

CONFIG_FILE = "config.json"
GENERATOR_FILES = ("generator.safetensors", "bigvgan_generator.pt", "generator.pt")  # in order of preference


def read_bigvgan(folder: Path) -> BigVGANConfig:
    """Reads `config.json` of a BigVGAN folder; what it says of training is skipped.

    Raises:
        ConfigError: no such file, no JSON, or a key that is missing, of another type or out of range.
    """
    path = folder / CONFIG_FILE
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder}: not a BigVGAN folder, {CONFIG_FILE} cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {' '.join(str(error).split())[:200]}") from error
    try:
        return _config_from(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def generator_file(folder: Path) -> Path:
    """Finds the weights in a BigVGAN folder.

    Raises:
        CheckpointError: there are none.
    """
    for name in GENERATOR_FILES:
        if (path := folder / name).is_file():
            return path
    raise CheckpointError(f"{folder}: none of {', '.join(GENERATOR_FILES)} is there")


def check_mel(config: BigVGANConfig, flow: MelSettings) -> None:
    """Compares what a vocoder takes with what a flow makes.

    Raises:
        ConfigError: they differ; everything that does is named.
    """
    names = {"sample_rate_hz": "sampling_rate", "hop_samples": "hop_size", "bands": "num_mels"}
    differing = [
        f"{name} is {ours} instead of {wanted}"
        for field, name in names.items()
        if (ours := getattr(config.mel, field)) != (wanted := getattr(flow, field))
    ]
    if differing:
        raise ConfigError(f"BigVGAN: {', '.join(differing)}; take one that was trained on mels as the flow makes them")


def _config_from(document: object) -> BigVGANConfig:
    if not isinstance(document, dict):
        raise ConfigError(f"expected an object, got {type(document).__name__}")
    fields = dataclasses.fields(BigVGANConfig)
    for field in fields:
        if field.name not in document and field.default is dataclasses.MISSING:
            raise ConfigError(f"{field.name}: missing")
    return from_mapping(BigVGANConfig, {f.name: document[f.name] for f in fields if f.name in document}, "")
