"""Builder of engines: either TensorRT package turns an ONNX file into one, in the precision that the graph has.

Engines are strongly typed, so both packages, and TensorRT 10 and 11, are driven by the same calls; what only some of
them have is looked for. Before opset 23 graphs have no `Attention` operator, so that of float32, for which there is no
kernel, never has to be taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from token2wav.execution.artifacts import Precision
from token2wav_export.errors import ExportError
from token2wav_export.packages import Package
from token2wav_export.profiles import Shapes


def build_engine(
    package: Package,
    source: Path,
    engine: Path,
    *,
    precision: Precision,
    profiles: Sequence[Shapes],
    compute_capabilities: Sequence[str],
    timing_cache: Path,
) -> tuple[str, ...]:
    """Builds and writes an engine.

    Args:
        package: TensorRT package that builds.
        source: ONNX file, with its weights beside it.
        engine: file to write.
        precision: number type of the graph. TF32 is turned off for float32, of which it would keep 10 bits of mantissa.
        profiles: shapes of all inputs that have a free dimension.
        compute_capabilities: GPUs to build for; none for the package's choice.
        timing_cache: file in which ordinary TensorRT keeps what it measured, to build faster the next time.

    Returns:
        Flags that differ from the package's defaults.

    Raises:
        ExportError: the package refuses the graph or the profiles.
    """
    trt = package.module
    logger = _logger(package)
    logger.errors.clear()
    builder = trt.Builder(logger)
    kinds = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(1 << int(kinds.STRONGLY_TYPED) if hasattr(kinds, "STRONGLY_TYPED") else 0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(source)):
        raise _failed(package, source, [parser.get_error(i).desc() for i in range(parser.num_errors)] or logger.errors)
    config = builder.create_builder_config()
    if precision == "float32":
        config.clear_flag(trt.BuilderFlag.TF32)
    for place, capability in enumerate(compute_capabilities):
        config.num_compute_capabilities = len(compute_capabilities)
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), place)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, (smallest, best, largest) in shapes.items():
            profile.set_shape(name, smallest, best, largest)
        if config.add_optimization_profile(profile) < 0:
            raise _failed(package, source, logger.errors)
    measured = package.name == "tensorrt"  # TensorRT-RTX measures nothing before it runs
    if measured:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    with tqdm(desc=f"{package.name}: {engine.name}", unit="step", leave=False, disable=None) as bar:
        config.progress_monitor = _monitor(package, bar)
        blob = builder.build_serialized_network(network, config)
    if blob is None:
        raise _failed(package, source, logger.errors)
    engine.write_bytes(blob)
    if measured:
        timing_cache.write_bytes(config.get_timing_cache().serialize())
    return ("TF32 off",) if precision == "float32" else ()


def _failed(package: Package, source: Path, errors: Sequence[str]) -> ExportError:
    reason = " ".join(errors[-1].split())[:500] if errors else "it gives no reason"
    return ExportError(f"{package.name} {package.version} cannot build {source.name}: {reason}")


@cache
def _logger(package: Package) -> Any:
    """Returns the one logger that a process may have."""
    trt = package.module

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        """Keeps errors, drops the rest."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)

    return Logger()


def _monitor(package: Package, bar: tqdm[Any]) -> Any:
    trt = package.module

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        """Shows the steps of all phases on one bar: their number is only known when they start."""

        def __init__(self) -> None:
            super().__init__()
            self._left: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._left[phase_name] = num_steps
            bar.total = (bar.total or 0) + num_steps
            bar.set_postfix_str(phase_name, refresh=False)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._left[phase_name] -= 1
            bar.update()
            return True

        def phase_finish(self, phase_name: str) -> None:
            bar.update(self._left.pop(phase_name))

    return Monitor()
