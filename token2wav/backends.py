"""Backend of a model: its selection, and the runners of the flow and its encoder on it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from token2wav.cache.encoder_cache import EncoderCache
from token2wav.cache.paged_kv_cache import PagedKVCache, Storage
from token2wav.cache.states import StateStore
from token2wav.config import RuntimeConfig
from token2wav.config.model_config import StageName
from token2wav.errors import ArtifactError, BackendUnavailableError, ConfigError, one_line
from token2wav.execution.batch import BatchSize
from token2wav.execution.captured_sizes import (
    CAPTURED_BLOCKS,
    ONE_GRAPH_BLOCKS,
    PAST_PAGES,
    PROVISIONAL_BLOCKS,
)
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import ExportedModule, StepMaker, TorchStep
from token2wav.exported.run import (
    PACKAGES,
    OnnxModule,
    TensorRTModule,
    check_provider,
    package,
    target_of,
)
from token2wav.exported.step import ExportedStep
from token2wav.networks.estimator import Estimator
from token2wav.networks.ode import OdeTables
from token2wav.published.artifacts import EngineFolder, GraphName, Precision
from token2wav.stages.encoder_runner import BlockEncoderRunner, ChunkEncoderRunner, EncoderRunner
from token2wav.stages.stage import BackendName, Encoder

log = logging.getLogger(__name__)

# Fastest first. On a GPU this order is an assumption until `make gpu-check` has measured it: a
# TensorRT engine holds few streams, so a batch of 64 streams runs as 16 batches one after another.
# On a CPU torch was measured to be faster than ONNX Runtime, except for first chunks of very small
# models (benchmarks/results/engines.json).
_ORDER: dict[str, tuple[BackendName, ...]] = {
    "cpu": ("torch", "onnx"),
    "cuda": ("torch", "tensorrt", "onnx"),
}


# Provisional chunks have few blocks: the end of the prompt, and an incomplete block.
_PROVISIONAL_CHUNK = 2
# Sizes of the CUDA graphs on an exported step, which pads its inputs: numbers of past blocks, up to
# one minute with the prompt, and numbers of streams. A batch with a longer past runs eagerly.
_CAPTURED_PAST = (4, 8, 16, 32, 64)
_CAPTURED_STREAMS = (1, 2, 4)
_LEAST_CAPABILITY = (8, 0)  # first compute capability with matrix units for TF32
_LEAST_TRITON = (3, 5)  # first release that multiplies matrices of float64, for the F0 predictor
FLOAT8_CAPABILITY = (8, 9)  # first compute capability that converts float8; Triton needs it
_HEAD_SIZES = (16, 32, 64, 128)  # powers of two, because the tiles of a kernel need them


@dataclass(frozen=True)
class LoadContext:
    """Folder, runtime settings and device with which a model is loaded."""

    folder: Path
    runtime: RuntimeConfig
    device: torch.device
    streams: int = 0  # open streams for which memory is allocated at load

    @property
    def precision(self) -> Precision:
        if self.runtime.precision == "auto":
            return "float16" if self.device.type == "cuda" else "float32"
        return self.runtime.precision

    @property
    def cache_storage(self) -> Storage:
        setting = self.runtime.cache_storage
        return self.precision if setting == "auto" else setting

    @property
    def engines(self) -> EngineFolder:
        path = Path(self.runtime.engines) if self.runtime.engines else None
        return EngineFolder(self.folder, path)


@dataclass(frozen=True)
class Backend:
    """Backend of a model. It runs on torch the parts for which it has no exported network."""

    name: BackendName
    step: ExportedModule | None = None  # of the estimator
    vocoder: ExportedModule | None = None  # or codec decoder

    @property
    def most_streams(self) -> int:
        """Most chunks in a batch of the flow, see `StageSummary`."""
        return max(_CAPTURED_STREAMS) if self.name == "tensorrt" else 0


def choose(context: LoadContext, stages: Sequence[StageName], *, torch_only: str = "") -> Backend:
    """Chooses the backend of the settings. For `auto`, chooses the fastest backend with packages
    and artifacts on this machine.

    Args:
        torch_only: name of a feature of the model that runs on torch alone; empty for none.

    Raises:
        ConfigError: the backend of the settings cannot run here, or cannot run the feature, or the
            device cannot store the cache or multiply as the settings say.
    """
    _check_storage(context)
    if "decoder" in stages:
        _check_decoder_precision(context)
    if torch_only:
        if context.runtime.backend not in ("auto", "torch"):
            raise ConfigError(
                f"runtime.backend: {context.runtime.backend} cannot run {torch_only}; set torch"
            )
        return Backend("torch")
    loaders: dict[BackendName, Callable[[], Backend]] = {
        "torch": lambda: Backend("torch"),
        "onnx": lambda: _onnx(context, stages),
        "tensorrt": lambda: _tensorrt(context, stages),
        "pause": lambda: Backend("pause"),
    }
    if context.runtime.backend != "auto":
        return loaders[context.runtime.backend]()
    for name in _ORDER[context.device.type]:
        try:
            return loaders[name]()
        except ConfigError as error:
            log.info("backend %s has priority but cannot be used: %s", name, error)
    raise AssertionError("torch is always available")


def _check_storage(context: LoadContext) -> None:
    """Raises ConfigError if kernels on the device cannot read the storage type of the settings."""
    if context.runtime.cache_storage == "float8":
        device = context.device
        if device.type == "cuda" and (
            (capability := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY
        ):
            least, found = (f"{major}.{minor}" for major, minor in (FLOAT8_CAPABILITY, capability))
            raise ConfigError(
                f"runtime.cache_storage: float8 needs a GPU of compute capability {least} or more, "
                f"but {device} has {found}; set int8"
            )


def _check_decoder_precision(context: LoadContext) -> None:
    """Raises ConfigError if a GPU or its torch cannot multiply as the settings say."""
    precision, on_gpu = context.runtime.decoder_precision, context.device.type == "cuda"
    if precision != "float32" and on_gpu and "dtype" not in torch.ops.aten.mm.overloads():
        raise ConfigError(
            f"runtime.decoder_precision: {precision} needs torch 2.8 or later on a GPU, but this "
            f"is torch {torch.__version__}; set float32"
        )


def flow_runner(
    backend: Backend,
    parts: tuple[Estimator, OdeTables, PagedKVCache],
    states: StateStore,
    longest_blocks: int = _PROVISIONAL_CHUNK,
    kernel_step: Callable[[], StepMaker | None] = lambda: None,
    pool: GraphPool | None = None,
    *,
    provisional: bool = False,
) -> FlowRunner:
    """Makes the runner of a flow on a backend. It uses CUDA graphs if there is a pool for them.

    Args:
        parts: estimator, tables of its ODE schedule, and key-value cache.
        kernel_step: `Family.kernel_step`.
        pool: memory pool of the CUDA graphs; None to run eagerly.
        provisional: whether the runner computes provisional chunks only.
    """
    if backend.step is None:
        device, dim_head = parts[-1].device, parts[-1].layout.dim_head
        can_run = pool is not None and kernels_run(device, dim_head)
        make = kernel_step() if can_run else None
        if make is None:
            return FlowRunner(TorchStep(*parts), states)
        step = make(*parts)
        buckets = _kernel_buckets(PROVISIONAL_BLOCKS if provisional else max(CAPTURED_BLOCKS))
        # A batch of provisional chunks is short, and the scheduler never interrupts it.
        in_steps = [size for size in buckets if size.blocks > ONE_GRAPH_BLOCKS and not provisional]
    else:
        step, buckets = ExportedStep(*parts, backend.step), exported_buckets(longest_blocks)
        in_steps = []
        if pool is None or backend.name == "onnx":
            return FlowRunner(step, states)
    log.info(
        "the flow runs as %s, with CUDA graphs for %d sizes of batches",
        *(type(step).__name__, len(buckets)),
    )
    runner = FlowRunner(step, states, buckets, pool, in_steps)
    if isinstance(backend.step, TensorRTModule):
        backend.step.save_kernels()  # the captures have compiled all kernels
    return runner


def encoder_runner(
    encoder: Encoder,
    cache: EncoderCache,
    states: StateStore,
    block_tokens: int,
    pool: GraphPool | None = None,
) -> EncoderRunner:
    """Makes the runner of a flow's encoder: in CUDA graphs if there is a pool for them, else chunk
    by chunk.
    """
    heads, dim_head = encoder.attention_heads
    # a state reaches back into one block at most
    if pool is None or encoder.lookbehind > block_tokens:
        return ChunkEncoderRunner(encoder, cache, states)
    if heads and not kernels_run(encoder.device, dim_head):
        return ChunkEncoderRunner(encoder, cache, states)
    buckets = _kernel_buckets(max(CAPTURED_BLOCKS))
    log.info("the encoder runs in %d CUDA graphs", len(buckets))
    return BlockEncoderRunner(encoder, cache, states, block_tokens, buckets, pool)


def _kernel_buckets(most: int) -> list[BatchSize]:
    """Lists the sizes of at most `most` blocks that are captured on kernels."""
    return [BatchSize(blocks, 1, PAST_PAGES) for blocks in CAPTURED_BLOCKS if blocks <= most]


def exported_buckets(longest: int, past: Sequence[int] = _CAPTURED_PAST) -> list[BatchSize]:
    """Lists batch sizes to capture. Every batch up to the largest size fits a size of the list
    with moderate padding.
    """
    lengths = sorted({1, 2, *range(4, longest + 1, 4), longest})
    return [BatchSize(*size) for size in product(_CAPTURED_STREAMS, lengths, past)]


def kernels_run(device: torch.device, dim_head: int) -> bool:
    """Returns whether the kernels of a flow can run: the device can run kernels, and they exist for
    the size of the attention heads.
    """
    return dim_head in _HEAD_SIZES and gpu_runs_kernels(device)


def gpu_runs_kernels(device: torch.device) -> bool:
    """Returns whether kernels can run: the Triton language is installed and can compile, and the
    GPU has the matrix units that they need.

    The device `meta` stands for a GPU that has them. Nothing is computed on it;
    lab/launches/table.py counts the launches.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "meta":
        return True
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY and _triton_compiles()


def _triton_compiles() -> bool:
    import triton
    from triton.runtime import driver

    if tuple(map(int, triton.__version__.split(".")[:2])) < _LEAST_TRITON:
        log.warning(
            "the model runs without kernels: they need the Triton language %d.%d or later, but "
            "this is %s; install a later torch",
            *_LEAST_TRITON,
            triton.__version__,
        )
        return False
    try:
        # This call compiles a small library. A container may lack the compiler or headers for it.
        driver.active.get_current_device()
    except Exception as error:
        log.warning(
            "the model runs without kernels: the Triton language cannot compile: %s",
            error,
        )
        return False
    return True


def _onnx(context: LoadContext, stages: Sequence[StageName]) -> Backend:
    if importlib.util.find_spec("onnxruntime") is None:
        extra = "onnx-gpu" if context.device.type == "cuda" else "onnx"
        raise BackendUnavailableError(
            f"onnxruntime is not installed; run: pip install 'token2wav[{extra}]'"
        )
    check_provider(context.device)
    if "decoder" in stages:
        return Backend("onnx", vocoder=_onnx_module(context, "decoder", "float32"))
    step = _onnx_module(context, "step", context.precision)
    return Backend("onnx", step, _onnx_module(context, "vocoder", "float32"))


def _onnx_module(context: LoadContext, graph: GraphName, precision: Precision) -> OnnxModule:
    path = context.engines.find(graph, precision, "onnx")
    try:
        return OnnxModule(path, context.device)
    except Exception as error:  # a damaged file makes ONNX Runtime raise many kinds of errors
        command = context.engines.command(graph, precision, "onnx")
        raise ArtifactError(
            f"{path}: cannot be loaded: {one_line(error)}; if it is damaged, run: {command}"
        ) from error


def _tensorrt(context: LoadContext, stages: Sequence[StageName]) -> Backend:
    if "decoder" in stages:
        raise ConfigError("runtime.backend: tensorrt cannot run a codec decoder; set torch or onnx")
    if context.device.type != "cuda":
        raise BackendUnavailableError(
            f"tensorrt needs an NVIDIA GPU, but the device is {context.device}"
        )
    problems = []
    for name in PACKAGES:
        try:
            versions: dict[str, str] = {name: package(name).__version__}
            target = target_of(context.device)
            step = context.engines.find(
                "step",
                context.precision,
                name,
                versions=versions,
                target=target,
            )
            return Backend("tensorrt", TensorRTModule(step, name, context.device))
        except ConfigError as error:
            problems.append(str(error))
    raise BackendUnavailableError("; ".join(problems))
