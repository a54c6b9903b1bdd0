"""Imports of public packages that are installed without their dependencies.

The packages ask for much that decoding never uses. Modules that they import and never call are
replaced by empty ones.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class EmptyModule(types.ModuleType):
    """Module in which every name is an empty class that accepts any arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        anything = {
            "__init__": lambda *_, **__: None,
            "__getattr__": lambda *_: lambda *_, **__: None,
        }
        return type(name, (), anything)


def package_folder(package: str) -> Path:
    """Finds the folder of an installed package, without importing it.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    [root] = spec.submodule_search_locations or []
    return Path(root)


def bare_package(name: str, folder: Path) -> None:
    """Makes the modules in a folder importable below `name`, without running its `__init__.py`."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(folder)]


def module_of(name: str, path: Path) -> Any:
    """Loads one file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refilled(
    kind: Any,
    config: Any,
    fill: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    **options: Any,
) -> Any:
    """Makes a model of `transformers` with random weights.

    Args:
        fill: replaces the values of a state dict with published names.
        options: options of `from_pretrained`.
    """
    with TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        save_file(fill(load_file(path)), path, {"format": "pt"})
        return kind.from_pretrained(folder, **options).eval()
