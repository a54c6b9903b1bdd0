"""Builder of TensorRT engines from ONNX files, with ordinary TensorRT (10 or 11) or TensorRT-RTX.

Engines are strongly typed: the number types in the graph decide the precision of each operation.
The same calls therefore work with both packages and all versions. Features that only some versions
have are looked up at run time.

The graphs must not contain the ONNX operator `Attention`, because TensorRT has no float32 kernel
for it. Exports therefore use an opset below 23, the first opset with this operator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from token2wav.errors import BackendUnavailableError, ConfigError
from token2wav.exported.run import PACKAGES, Package, package, target_of
from token2wav.published.artifacts import Precision
from token2wav_export import ExportError
from token2wav_export.profiles import Shapes

_AMPERE = 8.0
_CAPTURABLE = "REQUIRE_USER_ALLOCATION"
# Capability of the A100. The enumeration in TensorRT-RTX lists it, but NVIDIA's support matrices
# (up to version 1.5) do not.
_NOT_SUPPORTED = ("8.0",)
_INSTALL = (
    "install TensorRT-RTX for GeForce, workstation and L4 or L40 GPUs (pip install "
    "tensorrt-rtx-cu13), or ordinary "
    "TensorRT for data centre GPUs (pip install tensorrt, or NVIDIA's containers)"
)


def load_package(name: Package | Literal["auto"]) -> Package:
    """Imports a TensorRT package, and returns its name. `auto` prefers ordinary TensorRT. Raises
    BackendUnavailableError if the package is not installed, or a library that it needs is missing.
    """
    candidates = PACKAGES if name == "auto" else (name,)
    for candidate in candidates:
        if importlib.util.find_spec(candidate) is not None:
            package(candidate)
            return candidate
    raise BackendUnavailableError(f"{' and '.join(candidates)} cannot be imported; {_INSTALL}")


def version_of(name: Package) -> str:
    """Returns the version of a package. Raises BackendUnavailableError if the package cannot be
    imported.
    """
    return str(package(name).__version__)


def own_target() -> dict[str, str]:
    """Returns the properties of this machine's GPU as `EngineFolder.find` takes them. Empty if
    torch sees no GPU.
    """
    return target_of(torch.device("cuda")) if torch.cuda.is_available() else {}


def build_target(name: Package, compute_capabilities: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the target of an engine: the GPUs for which the package builds it.

    Ordinary TensorRT builds for this machine's GPU. TensorRT-RTX builds for the given compute
    capabilities. If none are given, it builds for every supported GPU from Ampere on, and therefore
    not for Turing (7.5). Raises ConfigError if the package does not support a capability, or cannot
    build for it on this machine.
    """
    if name == "tensorrt_rtx":
        suffixes = [
            member.removeprefix("SM") for member in package(name).ComputeCapability.__members__
        ]
        numbers = [suffix for suffix in suffixes if suffix.isdecimal()]
        capabilities = [f"{number[:-1]}.{number[-1]}" for number in numbers]
        supported = [capability for capability in capabilities if capability not in _NOT_SUPPORTED]
        for capability in compute_capabilities:
            if capability not in supported:
                raise ConfigError(
                    f"--compute-capability: {capability} is not one of {', '.join(supported)}, "
                    "the capabilities that TensorRT-RTX supports; other GPUs need ordinary "
                    "TensorRT"
                )
        return {
            "compute_capability": tuple(
                compute_capabilities
                or (capability for capability in supported if float(capability) >= _AMPERE)
            )
        }
    if compute_capabilities:
        raise ConfigError(
            "--compute-capability: ordinary TensorRT builds only for the GPU of this "
            "machine; omit the option"
        )
    if target := own_target():
        return {key: (value,) for key, value in target.items()}
    raise ConfigError(
        "--package: ordinary TensorRT needs the GPU that it builds for, but torch finds no GPU"
    )


def build_engine(
    name: Package,
    source: Path,
    engine: Path,
    *,
    precision: Precision,
    profiles: Sequence[Shapes],
    compute_capabilities: Sequence[str],
    timing_cache: Path,
    capturable: bool = False,
) -> tuple[str, ...]:
    """Builds and writes an engine. Raises ExportError if the package rejects the graph or the
    profiles.

    Args:
        source: ONNX file. Its weights lie beside it.
        precision: number type of the graph. For float32, TF32 is turned off, because it keeps only
            10 bits of mantissa.
        profiles: shapes of all inputs that have a free dimension.
        compute_capabilities: GPUs to build for with TensorRT-RTX; empty for ordinary TensorRT.
        timing_cache: file in which ordinary TensorRT stores its measurements, to build faster the
            next time.
        capturable: whether a CUDA graph must be able to capture the engine. A caller that runs such
            an engine of TensorRT-RTX must provide its memory.

    Returns:
        Flags that differ from the defaults of the package.
    """
    trt, logger = package(name), _logger(name)
    logger.errors.clear()
    builder = trt.Builder(logger)
    network_flags = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(
        1 << int(network_flags.STRONGLY_TYPED) if hasattr(network_flags, "STRONGLY_TYPED") else 0
    )
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(source)):
        raise _failed(
            name,
            source,
            [parser.get_error(i).desc() for i in range(parser.num_errors)] or logger.errors,
        )
    config, flags = builder.create_builder_config(), list[str]()
    if precision == "float32":
        config.clear_flag(trt.BuilderFlag.TF32)
        flags.append("TF32 off")
    # An engine of TensorRT-RTX must not allocate memory of its own, or CUDA graphs cannot capture
    # it. Ordinary TensorRT needs no such flag.
    if capturable and hasattr(trt.BuilderFlag, _CAPTURABLE):
        config.set_flag(getattr(trt.BuilderFlag, _CAPTURABLE))
        flags.append(_CAPTURABLE)
    for index, capability in enumerate(compute_capabilities):
        config.num_compute_capabilities = len(compute_capabilities)
        config.set_compute_capability(
            getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), index
        )
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for tensor, (smallest, best, largest) in shapes.items():
            profile.set_shape(tensor, smallest, best, largest)
        if config.add_optimization_profile(profile) < 0:
            raise _failed(name, source, logger.errors)
    has_timings = name == "tensorrt"  # TensorRT-RTX measures nothing before it runs
    if has_timings:
        timings = timing_cache.read_bytes() if timing_cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(timings), ignore_mismatch=False)
    with tqdm(desc=f"{name}: {engine.name}", unit="step", leave=False, disable=None) as bar:
        config.progress_monitor = _monitor(name, bar)
        blob = builder.build_serialized_network(network, config)
    if blob is None:
        raise _failed(name, source, logger.errors)
    engine.write_bytes(blob)
    if has_timings:
        timing_cache.write_bytes(config.get_timing_cache().serialize())
    return tuple(flags)


def _failed(name: Package, source: Path, errors: Sequence[str]) -> ExportError:
    reason = " ".join(errors[-1].split())[:500] if errors else "no reason given"
    return ExportError(f"{name} {version_of(name)} cannot build {source.name}: {reason}")


@cache
def _logger(name: Package) -> Any:
    """Returns the logger of a package. A process may have only one logger for each package."""
    trt = package(name)

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        """Logger that keeps errors and drops all other messages."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)

    return Logger()


def _monitor(name: Package, bar: tqdm[Any]) -> Any:
    trt = package(name)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        """Progress monitor with one bar for the steps of all phases.

        The number of steps of a phase is known only when the phase starts.
        """

        def __init__(self) -> None:
            super().__init__()
            self._steps_left: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps_left[phase_name] = num_steps
            bar.total = (bar.total or 0) + num_steps
            bar.set_postfix_str(phase_name, refresh=False)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._steps_left[phase_name] -= 1
            bar.update()
            return True

        def phase_finish(self, phase_name: str) -> None:
            bar.update(self._steps_left.pop(phase_name))

    return Monitor()
