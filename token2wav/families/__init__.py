"""Families of models: each is a package that reads a published folder and puts its networks together into stages.

A family has, beside its name:

- `FILES`: names of files, any of which tells that a folder is one of its models; none for a part of other families.
- `read(folder)`: the `ModelConfig`, without importing torch.
- a module `build` with `build(host, config, stream)`, which makes the `Stages`, and `check(folder, config)`, which
  reads all weights without building anything on a device. Where settings choose the engine, `choose(host, stream)`
  finds it before weights load, and raises ConfigError if it cannot be used. Where the flow has a cache,
  `networks(config, storage)` makes `Networks` without weights, for `token2wav-plan`; where these can be exported,
  `load(folder, config, stem)` loads flow or vocoder in float32 on the CPU, for `token2wav-export`.

Packages in this folder are families, and so are those that an installed distribution names in its entry points of the
group `token2wav.families`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from token2wav.errors import ConfigError
from token2wav.model_config import ModelConfig, Stem

GROUP = "token2wav.families"


@dataclass(frozen=True, eq=False)
class Exportable:
    """Model folder, for what exports its networks."""

    config: ModelConfig
    networks: Any  # `Networks` without weights, on the device `meta`
    load: Callable[[Stem], Any]  # reads flow or vocoder, in float32 on the CPU


def family_of(folder: Path) -> Any:
    """Finds the package of the family that a model folder belongs to.

    Raises:
        ConfigError: no such folder, or no family knows a file in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such model folder")
    families = _families()
    for family in families:
        if any((folder / file).is_file() for file in family.FILES):
            return family
    files = ", ".join(file for family in families for file in family.FILES)
    raise ConfigError(f"{folder}: not a model folder; none of {files} is there")


def read_config(folder: Path) -> ModelConfig:
    """Reads the configuration of a model folder.

    Raises:
        ConfigError: no family knows the folder, or a value in its files is missing, of another type or out of range.
    """
    config: ModelConfig = family_of(folder).read(folder)
    return config


def check_folder(folder: Path) -> None:
    """Reads configuration and weights of a folder without building anything on a device.

    Raises:
        Token2WavError: the folder cannot be served, and why.
    """
    builder(folder).check(folder, read_config(folder))


def builder(folder: Path) -> Any:
    """Imports the module `build` of the family that a model folder belongs to, and torch with it."""
    return import_module(f"{family_of(folder).__name__}.build")


def exportable(folder: Path) -> Exportable:
    """Gets the networks of a model folder.

    Raises:
        ConfigError: no such folder, or its family exports none.
    """
    build, config = builder(folder), read_config(folder)
    if not hasattr(build, "load"):
        raise ConfigError(f"{folder}: its family runs on torch alone; it has no graphs to export")
    import torch

    with torch.device("meta"):
        made = build.networks(config, "float32")
    return Exportable(config, made, partial(build.load, folder, config))


def networks(config: ModelConfig, storage: str) -> Any:
    """Makes the `Networks` of a model without weights, on the device that is torch's default.

    Keys and values are cached in the type `storage`.

    Raises:
        ConfigError: the model's flow has no cache.
    """
    # Beside the family's own kind of configuration, if it has one.
    name = f"{import_module(type(config).__module__).__package__}.build"
    build: Any = import_module(name) if find_spec(name) else None
    if not hasattr(build, "networks"):
        raise ConfigError("flow: it keeps nothing in a cache, which is what is planned here")
    return build.networks(config, storage)


def _families() -> list[ModuleType]:
    own = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__) if found.ispkg]
    return [*own, *(point.load() for point in entry_points(group=GROUP))]
