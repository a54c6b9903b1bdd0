"""TensorRT packages: those that are installed are found, and imported when asked for, with the GPU they run on."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, get_args

from token2wav.errors import ConfigError
from token2wav_export.errors import MissingPackageError

PackageName = Literal["tensorrt", "tensorrt_rtx"]

_AMPERE = 8.0
_INSTALL = (
    "install TensorRT-RTX for GeForce, workstation and L4 or L40 GPUs (pip install tensorrt-rtx-cu13), or ordinary "
    "TensorRT for data centre GPUs (pip install tensorrt, or NVIDIA's containers)"
)


@dataclass(frozen=True)
class Package:
    """TensorRT package, one of two that have the same interface but for details.

    Attributes:
        name: name of the module, which is the backend's in descriptions.
        module: imported module.
    """

    name: PackageName
    module: Any

    @property
    def version(self) -> str:
        return str(self.module.__version__)


def load_package(name: PackageName | Literal["auto"]) -> Package:
    """Imports a package by name; `auto` takes ordinary TensorRT before TensorRT-RTX.

    Raises:
        MissingPackageError: it is not installed.
    """
    wanted: tuple[PackageName, ...] = get_args(PackageName) if name == "auto" else (name,)
    for candidate in wanted:
        if importlib.util.find_spec(candidate) is not None:
            return Package(candidate, importlib.import_module(candidate))
    raise MissingPackageError(f"{' and '.join(wanted)} cannot be imported; {_INSTALL}")


def installed_version(name: PackageName) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return load_package(name).version
    except MissingPackageError:
        return None


def own_target() -> dict[str, str]:
    """Returns this machine's GPU as `EngineFolder.find` takes it; empty where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from token2wav.execution.exported_graphs import target_of

    return target_of(torch.device("cuda"))


def build_target(package: Package, compute_capabilities: list[str]) -> dict[str, tuple[str, ...]]:
    """Returns the target of an engine: given capabilities, or this machine's GPU where the package cannot choose.

    Without capabilities TensorRT-RTX builds for every GPU that it knows from Ampere on: not for Turing, 7.5.

    Raises:
        ConfigError: a capability that the package does not know, or that it cannot build for from here.
    """
    if package.name == "tensorrt_rtx":
        known = [
            f"{digits[:-1]}.{digits[-1]}"
            for name in package.module.ComputeCapability.__members__
            if (digits := name.removeprefix("SM")).isdecimal()
        ]
        for capability in compute_capabilities:
            if capability not in known:
                raise ConfigError(
                    f"--compute-capability: {capability} is not one of {', '.join(known)}, which TensorRT-RTX builds "
                    "for; other GPUs need ordinary TensorRT"
                )
        return {"compute_capability": tuple(compute_capabilities or (c for c in known if float(c) >= _AMPERE))}
    if compute_capabilities:
        raise ConfigError(
            "--compute-capability: ordinary TensorRT builds for the GPU of this machine only; leave it out"
        )
    target = own_target()
    if not target:
        raise ConfigError("--package: ordinary TensorRT builds on the GPU it is for, and torch sees none here")
    return {key: (value,) for key, value in target.items()}
