"""Exported graphs as TensorRT engines, on torch's memory and streams. Serves `tensorrt` and `tensorrt-rtx` alike.

No engine has been executed where this was written: building needs no GPU, running does. `make gpu-check` runs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from token2wav.errors import EngineError, EngineUnavailableError

Package = Literal["tensorrt", "tensorrt_rtx"]
PACKAGES: tuple[Package, ...] = ("tensorrt", "tensorrt_rtx")


@lru_cache
def package(name: Package) -> Any:
    """One of the two packages.

    Raises:
        EngineUnavailableError: it is not installed, or a library that it needs is missing.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineUnavailableError(f"{name} cannot be imported: {' '.join(str(error).split())[:200]}") from error


@lru_cache
def logger(name: Package) -> Any:
    """Of a package; there may be only one in a process."""
    trt = package(name)
    return trt.Logger(trt.Logger.WARNING)


def target_of(device: torch.device) -> dict[str, str]:
    """Target that an engine must have been built for to run on a device, as an engine folder notes it."""
    major, minor = torch.cuda.get_device_capability(device)
    return {"compute_capability": f"{major}.{minor}", "gpu": torch.cuda.get_device_name(device)}


class TensorRTGraph:
    """An engine that runs on torch's tensors, launched on torch's current stream.

    Every combination of shapes has an execution context of its own, because a captured CUDA graph keeps using the
    context that it was captured with.

    Args:
        path: of the serialised engine.
        name: package that built it.

    Raises:
        EngineUnavailableError: the package cannot be imported, or refuses the engine on this machine.
    """

    def __init__(self, path: Path, name: Package) -> None:
        self._trt = package(name)
        self._runtime = self._trt.Runtime(logger(name))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineUnavailableError(f"{path}: {name} {self._trt.__version__} cannot load it on this GPU")
        self._contexts: dict[tuple[tuple[int, ...], ...], Any] = {}

    @property
    def cache_type(self) -> torch.dtype:
        half = self._engine.get_tensor_dtype("past_key_0") == self._trt.DataType.HALF
        return torch.float16 if half else torch.float32

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether there is a profile for inputs of these shapes."""
        return self._profile(shapes) is not None

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Launches the engine and returns without waiting; tensors by name, contiguous.

        Raises:
            EngineError: no profile takes the shapes, or TensorRT refuses to run.
        """
        context = self._context({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        for name, tensor in {**inputs, **outputs}.items():
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise EngineError(f"tensorrt: no tensor '{name}' in the engine")
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EngineError("tensorrt: the engine could not be launched; its log says why")

    def _context(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        key = tuple(shapes.values())
        if key not in self._contexts:
            self._contexts[key] = self._new_context(shapes)
        return self._contexts[key]

    def _new_context(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        profile = self._profile(shapes)
        if profile is None:
            raise EngineError(f"tensorrt: the engine has no profile for x {shapes.get('x')}; build it with larger ones")
        context = self._engine.create_execution_context()
        stream = torch.cuda.current_stream()
        if context is None or not context.set_optimization_profile_async(profile, stream.cuda_stream):
            raise EngineError("tensorrt: no execution context; the GPU's memory may be full")
        stream.synchronize()
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise EngineError(f"tensorrt: input '{name}' cannot have shape {shape}")
        return context

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """The first profile whose bounds hold the shapes."""
        for profile in range(self._engine.num_optimization_profiles):
            if all(self._fits(name, shape, profile) for name, shape in shapes.items()):
                return profile
        return None

    def _fits(self, name: str, shape: tuple[int, ...], profile: int) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, profile)
        return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
