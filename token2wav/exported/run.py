"""Exported graphs that ONNX Runtime and TensorRT run on torch tensors, and the exported vocoder.

No TensorRT engine was executed while this code was written: an engine can be built without a GPU,
but not run. `make gpu-check` runs one.
"""

from __future__ import annotations

import importlib
import logging
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.errors import BackendError, BackendUnavailableError, one_line
from token2wav.execution.device import cpu_threads, cuda_cache_bytes
from token2wav.execution.step import ExportedModule
from token2wav.layers.position_noise import PositionNoise
from token2wav.layers.streaming import StateSpec, StreamStep, state_specs
from token2wav.networks.hift import HiFT
from token2wav.networks.waveform_network import WaveformNetwork

log = logging.getLogger(__name__)

NOISE_FACTOR = "noise_factor"  # name of the input of a decoder with noise, see `StreamStep`
AUDIO = "audio"  # name of the output of the graph of a vocoder or of a codec decoder
# Prefixes of the name of a layer. They make the names of its state as an input and as an output.
PAST, NEW = "past_", "new_"
# Layers that run outside the graph of a vocoder: the F0 predictor needs double precision, the
# harmonic source holds the phase, and the fade-in comes after the graph.
_OUTSIDE = ("f0_predictor.", "m_source", "fade_in")


def exported_states(vocoder: WaveformNetwork) -> dict[nn.Module, StateSpec]:
    """Returns the state specs of the layers of a vocoder that its graph contains."""
    return {
        layer: spec
        for layer, spec in state_specs(vocoder).items()
        if not spec.name.startswith(_OUTSIDE)
    }


def takes_noise_factor(vocoder: WaveformNetwork) -> bool:
    """Returns whether the graph of a vocoder has the input `NOISE_FACTOR`."""
    return any(isinstance(layer, PositionNoise) for layer in vocoder.modules())


def signals_of(stage: StageName, network: WaveformNetwork) -> tuple[str, ...]:
    """Returns the names of the inputs of the graph of a vocoder or of a codec decoder, except for
    its states.
    """
    if stage == "decoder":
        return ("tokens",)
    return ("mel", "source") if isinstance(network, HiFT) else ("mel",)


class ExportedVocoder:
    """Exported graph that replaces `HiFT.decode`, or the method `forward` of another network.

    It has the signature of the method that it replaces, and uses the states of the torch layers.

    Args:
        vocoder: network that the graph was made from.
        signals: names of the inputs, see `signals_of`.
    """

    def __init__(
        self, graph: ExportedModule, vocoder: WaveformNetwork, signals: tuple[str, ...]
    ) -> None:
        self._graph, self._signals = graph, signals
        self._shape = (
            (vocoder.frame_samples,) if isinstance(vocoder, HiFT) else (1, vocoder.frame_samples)
        )
        self._specs = exported_states(vocoder)
        self._takes_noise_factor = takes_noise_factor(vocoder)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Computes audio from the arguments of the replaced method, and writes the new states to
        the step.
        """
        *signals, step = arguments
        assert isinstance(step, StreamStep)
        assert step.state is not None
        inputs = {
            name: signal.contiguous() for name, signal in zip(self._signals, signals, strict=True)
        }
        states = {spec.name: step.state[layer] for layer, spec in self._specs.items()}
        inputs |= {f"{PAST}{name}": state.contiguous() for name, state in states.items()}
        if self._takes_noise_factor:
            assert step.noise_factor is not None
            inputs[NOISE_FACTOR] = step.noise_factor
        frames, (*channels, samples) = signals[0], self._shape
        shape = len(frames), *channels, frames.shape[2] * samples
        audio = torch.empty(shape, device=frames.device)
        new = {
            name: torch.empty(state.shape, dtype=state.dtype, device=state.device)
            for name, state in states.items()
        }
        self._graph.run(
            inputs, {AUDIO: audio, **{f"{NEW}{name}": state for name, state in new.items()}}
        )
        for name, state in new.items():
            states[name].copy_(state)
        return audio


_TYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def check_provider(device: torch.device) -> None:
    """Checks that this build of ONNX Runtime can use a device."""
    import onnxruntime  # an optional dependency

    if (
        device.type == "cuda"
        and "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
    ):
        raise BackendUnavailableError(
            f"onnxruntime {onnxruntime.__version__} has no CUDA provider; run: "
            "pip uninstall onnxruntime; pip install 'token2wav[onnx-gpu]'"
        )


# Handle of the stream on which torch works by default. torch calls it 0, which ONNX Runtime takes
# for no stream.
_LEGACY_STREAM = 1


def cuda_options(device: torch.device) -> dict[str, str]:
    """Returns the options of ONNX Runtime's CUDA provider for one of the two graphs of a model.

    Work is launched on the stream on which torch works, so that neither has to wait for the other.
    Convolutions are chosen by a heuristic. By default each new shape is measured, which takes
    seconds for each length of a chunk. The arena grows by the requested size, and each graph may
    take half of the memory that the cache of keys and values leaves.
    """
    free = torch.cuda.mem_get_info(device)[0]
    stream = torch.cuda.current_stream(device).cuda_stream
    return {
        "device_id": str(device.index or 0),
        "use_tf32": "0",
        "user_compute_stream": str(stream or _LEGACY_STREAM),
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": str((free - cuda_cache_bytes(free)) // 2),
    }


class OnnxModule:
    """ONNX graph that runs on torch tensors. Files with its weights are in the same folder."""

    def __init__(self, path: Path, device: torch.device) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = cpu_threads()
        # Idle threads would spin and take cores from torch, which runs between two calls.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.type == "cuda":
            providers.insert(0, ("CUDAExecutionProvider", cuda_options(device)))
        self._session = onnxruntime.InferenceSession(path, options, providers=providers)
        # On a GPU a run returns before its kernels have ended. The stream orders them with torch's.
        self._run_options = onnxruntime.RunOptions()
        if device.type == "cuda":
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._device = device
        self._inputs = {value.name: value for value in self._session.get_inputs()}

    @property
    def cache_type(self) -> torch.dtype:
        return (
            torch.float16 if self._inputs["past_key_0"].type == "tensor(float16)" else torch.float32
        )

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return True

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Runs the graph on contiguous tensors on its device, by name. On a GPU it launches the
        work on torch's default stream, and returns without waiting.
        """
        binding = self._session.io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(
                    name,
                    self._device.type,
                    self._device.index or 0,
                    _TYPES[tensor.dtype],
                    tuple(tensor.shape),
                    tensor.data_ptr(),
                )
        self._session.run_with_iobinding(binding, self._run_options)


# Suffix of the file with the kernels that TensorRT-RTX compiled for an engine on this machine.
KERNELS = ".kernels"

Package = Literal["tensorrt", "tensorrt_rtx"]
PACKAGES: tuple[Package, ...] = ("tensorrt", "tensorrt_rtx")


@lru_cache
def package(name: Package) -> Any:
    """Imports one of the two packages of TensorRT."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"{name} cannot be imported: {one_line(error)[:200]}"
        ) from error


@lru_cache
def logger(name: Package) -> Any:
    """Returns the logger of a package. A process may have only one logger for each package."""
    trt = package(name)
    return trt.Logger(trt.Logger.WARNING)


def target_of(device: torch.device) -> dict[str, str]:
    """Returns the properties of a GPU that an engine must have been built for, as
    `EngineFolder.find` takes them.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return {"compute_capability": f"{major}.{minor}", "gpu": torch.cuda.get_device_name(device)}


@dataclass(eq=False)
class _Context:
    """Execution context of TensorRT.

    Attributes:
        capturable: whether a CUDA graph can capture its work, as it was after the latest run.
    """

    handle: Any  # the context of the package
    capturable: bool = True


class TensorRTModule:
    """TensorRT engine that runs on torch tensors, on the current CUDA stream of torch.

    Every combination of input shapes has its own execution context, because a captured CUDA graph
    keeps using the context of its capture. All contexts compute in one block of memory. The block
    is allocated with the engine, and has the size that the largest shapes need. Contexts can share
    it, because runs follow one another on one stream.

    TensorRT-RTX compiles kernels for the shapes of a context before the first run of the context.
    By default it compiles them later, and a captured graph would keep slower kernels that work for
    all shapes. `save_kernels` stores the kernels beside the engine for the next load.

    Args:
        name: package that built the engine.

    Raises:
        BackendUnavailableError: the package cannot be imported, or rejects the engine on this
            machine.
    """

    def __init__(self, path: Path, name: Package, device: torch.device) -> None:
        self._trt = package(name)
        self._runtime = self._trt.Runtime(logger(name))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise BackendUnavailableError(
                f"{path}: {name} {self._trt.__version__} cannot load it on this GPU"
            )
        # torch aligns memory to 512 bytes, and TensorRT needs 256.
        size = max(1, self._engine.device_memory_size_v2)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        # How contexts allocate memory, and for TensorRT-RTX how they compile: the argument of
        # `create_execution_context`.
        self._context_options = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._kernels_file = path.with_name(path.name + KERNELS)
        self._stored_kernels = b""
        self._kernels: Any = None  # cache of compiled kernels of TensorRT-RTX
        if name == "tensorrt_rtx":
            self._context_options = self._compiling_options()
        self._contexts: dict[tuple[tuple[int, ...], ...], _Context] = {}
        self._lock = threading.Lock()

    @property
    def cache_type(self) -> torch.dtype:
        half = self._engine.get_tensor_dtype("past_key_0") == self._trt.DataType.HALF
        return torch.float16 if half else torch.float32

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the engine has a profile for inputs of these shapes."""
        return self._profile(shapes) is not None

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Launches the engine, and returns without waiting. Takes contiguous tensors by name.

        Raises:
            BackendError: no profile fits the shapes, TensorRT cannot run, or the current stream
                captures a graph and the engine cannot be captured.
        """
        with self._lock:  # a context serves one thread at a time
            context = self._context({name: tuple(tensor.shape) for name, tensor in inputs.items()})
            capturing = torch.cuda.is_current_stream_capturing()
            if capturing and not context.capturable:
                raise BackendError(
                    "tensorrt: the engine cannot be captured; build it again, with "
                    "token2wav export tensorrt"
                )
            for name, tensor in {**inputs, **outputs}.items():
                if not context.handle.set_tensor_address(name, tensor.data_ptr()):
                    raise BackendError(f"tensorrt: no tensor '{name}' in the engine")
            stream = torch.cuda.current_stream().cuda_stream
            if not context.handle.execute_async_v3(stream):
                raise BackendError(
                    "tensorrt: the engine could not be launched; the log has the reason"
                )
            # Only TensorRT-RTX reports this in advance. A capture in ordinary TensorRT just fails.
            if not capturing and hasattr(context.handle, "is_stream_capturable"):
                context.capturable = context.handle.is_stream_capturable(stream)

    def save_kernels(self) -> None:
        """Stores the kernels that TensorRT-RTX has compiled so far beside the engine, for the next
        load. If the folder cannot be written, a message is logged.
        """
        if self._kernels is None:
            return
        blob = bytes(self._kernels.serialize())
        if blob == self._stored_kernels:
            return
        draft = self._kernels_file.with_name(f"{self._kernels_file.name}.{uuid.uuid4().hex[:8]}")
        try:
            draft.write_bytes(blob)
            draft.replace(self._kernels_file)
        except OSError as error:
            log.info(
                "%s: cannot be written, so the next start compiles the kernels again: %s",
                *(self._kernels_file, error.strerror),
            )

    def _compiling_options(self) -> Any:
        """Makes the configuration of contexts of TensorRT-RTX, with the kernels that an earlier
        load has stored.
        """
        strategy = self._trt.DynamicShapesKernelSpecializationStrategy
        options = self._engine.create_runtime_config()
        options.set_execution_context_allocation_strategy(self._context_options)
        options.dynamic_shapes_kernel_specialization_strategy = strategy.EAGER
        self._kernels = options.create_runtime_cache()
        if self._kernels_file.is_file():
            stored = self._kernels_file.read_bytes()
            # The file of another GPU, driver or version is rejected, and replaced after this load.
            self._stored_kernels = stored if self._kernels.deserialize(stored) else b""
        options.set_runtime_cache(self._kernels)
        return options

    def _context(self, shapes: dict[str, tuple[int, ...]]) -> _Context:
        key = tuple(shapes.values())
        if key not in self._contexts:
            self._contexts[key] = self._new_context(shapes)
        return self._contexts[key]

    def _new_context(self, shapes: dict[str, tuple[int, ...]]) -> _Context:
        profile = self._profile(shapes)
        if profile is None:
            raise BackendError(
                f"tensorrt: the engine has no profile for x {shapes.get('x')}; build it with "
                f"larger ones"
            )
        handle = self._engine.create_execution_context(self._context_options)
        stream = torch.cuda.current_stream()
        if handle is None or not handle.set_optimization_profile_async(profile, stream.cuda_stream):
            raise BackendError("tensorrt: no execution context; the GPU's memory may be full")
        stream.synchronize()
        handle.set_device_memory(self._memory.data_ptr(), len(self._memory))
        for name, shape in shapes.items():
            if not handle.set_input_shape(name, shape):
                raise BackendError(f"tensorrt: input '{name}' cannot have shape {shape}")
        return _Context(handle)

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Returns the index of the first profile that fits the shapes; None if there is none."""
        for profile in range(self._engine.num_optimization_profiles):
            if all(self._fits(name, shape, profile) for name, shape in shapes.items()):
                return profile
        return None

    def _fits(self, name: str, shape: tuple[int, ...], profile: int) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, profile)
        return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
