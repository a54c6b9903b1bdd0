"""Which engine runs a model on this host: what the configuration names, or the fastest for which all is there."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from token2wav.artifacts import EngineFolder, Precision
from token2wav.config import RuntimeConfig
from token2wav.engines.cuda_graphs import graphs_enabled
from token2wav.engines.exported_steps import ExportedSteps, StepRunner
from token2wav.engines.exported_vocoder import GraphRunner
from token2wav.engines.packed import Batch, BatchShape, PackedBatch, likely_shapes
from token2wav.engines.packed_solver import PackedChunkSolver, Steps
from token2wav.engines.tensorrt_engine import PACKAGES, TensorRTGraph, package, target_of
from token2wav.engines.torch_engine import TorchChunkSolver
from token2wav.engines.torch_steps import TorchSteps
from token2wav.engines.work import ChunkSolver
from token2wav.errors import ConfigError, EngineUnavailableError
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.flow import Flow
from token2wav.flow.solver import EulerSolver
from token2wav.flow_config import EstimatorConfig

log = logging.getLogger(__name__)

EngineName = Literal["torch", "onnx", "tensorrt"]
# Fastest first; on a GPU that is an assumption until `make gpu-check` has run. On a CPU torch was measured to be faster
# than ONNX Runtime but for first chunks of very small models (benchmarks/results/engines.json).
_ORDER: dict[str, tuple[EngineName, ...]] = {"cpu": ("torch", "onnx"), "cuda": ("tensorrt", "torch", "onnx")}


_CAPTURED_PAST = 64  # blocks: a minute with the prompt; longer histories run without a graph
_CAPTURED_STREAMS = 4
_LEAST_CAPABILITY = (8, 0)  # from which on there are matrix units for TF32
_HEAD_SIZES = (16, 32, 64, 128)  # powers of two, as tiles have to be


@dataclass(frozen=True)
class EngineSummary:
    """What a model runs on, for reports and logs."""

    name: EngineName
    precision: Precision
    device: str


@dataclass(frozen=True)
class Host:
    """What an engine is chosen for.

    Attributes:
        folder: of the model.
        runtime: its configuration.
        device: that was chosen.
    """

    folder: Path
    runtime: RuntimeConfig
    device: torch.device

    @property
    def precision(self) -> Precision:
        if self.runtime.precision == "auto":
            return "float16" if self.device.type == "cuda" else "float32"
        return self.runtime.precision

    @property
    def engines(self) -> EngineFolder:
        return EngineFolder(Path(self.runtime.engines)) if self.runtime.engines else EngineFolder.of(self.folder)


@dataclass(frozen=True)
class Graphs:
    """Graphs that were found for an engine.

    Attributes:
        engine: that runs them.
        step: of the estimator; None for torch.
        vocoder: of the vocoder; None where torch runs it.
    """

    engine: EngineName
    step: StepRunner | None = None
    vocoder: GraphRunner | None = None


def choose(host: Host) -> Graphs:
    """The engine of a host, with its graphs loaded.

    Args:
        host: model, configuration and device.

    Raises:
        ConfigError: the engine that the configuration names cannot run here.
    """
    loaders: dict[EngineName, Callable[[], Graphs]] = {
        "torch": lambda: Graphs("torch"),
        "onnx": lambda: _onnx(host),
        "tensorrt": lambda: _tensorrt(host),
    }
    if not host.runtime.incremental:
        return Graphs("torch")
    if host.runtime.engine != "auto":
        return loaders[host.runtime.engine]()
    order = _ORDER[host.device.type]
    for index, name in enumerate(order):
        try:
            graphs = loaders[name]()
        except ConfigError as error:
            log.info("engine %s would come before others but cannot be used: %s", name, error)
            continue
        if slower := order[index + 1 :]:
            log.info("engine %s is the fastest on this kind of device, before %s", name, " and ".join(slower))
        return graphs
    raise AssertionError("torch can always be used")


def chunk_solver(
    graphs: Graphs,
    flow: Flow,
    solver: EulerSolver,
    store: KeyValueStore,
    left_blocks: int,
    longest_hop: int,
) -> ChunkSolver:
    """What integrates chunks on the engine that was chosen.

    Args:
        graphs: from `choose`.
        flow: on the device.
        solver: of its estimator.
        store: memory of all pages.
        left_blocks, longest_hop: see `CachedFlowEngine`.
    """
    device, config = flow.spk_embed_affine_layer.weight.device, flow.config.estimator
    capture = graphs_enabled(device) and graphs.engine != "onnx"
    if graphs.engine == "torch" and not capture:
        return TorchChunkSolver(flow.estimator, solver.tables, store, left_blocks)
    if graphs.engine == "torch" and _kernels_run(config, device):
        from token2wav.engines.fused_solver import fused_solver  # Triton-language kernels

        return fused_solver(flow, solver.tables, store, left_blocks, longest_hop)

    def prepare(shape: BatchShape) -> tuple[Batch, Steps]:
        batch = PackedBatch(shape, config, store, left_blocks, device)
        if graphs.step is None or not graphs.step.takes(ExportedSteps.shapes(batch, store)):
            return batch, TorchSteps(batch, flow.estimator, solver.tables, store)
        return batch, ExportedSteps(batch, graphs.step, solver.tables, store)

    block = flow.config.block_tokens
    hops = [1, 2, *range(4, longest_hop // block + 1, 4), longest_hop // block]
    shapes = likely_shapes(hops, _CAPTURED_PAST, _CAPTURED_STREAMS) if capture else []
    return PackedChunkSolver(prepare, solver.tables, shapes=shapes, capture=capture)


def _kernels_run(config: EstimatorConfig, device: torch.device) -> bool:
    """Whether there is the Triton language, and what its kernels ask of GPU and model."""
    return (
        importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        and config.dim_head in _HEAD_SIZES
    )


def _onnx(host: Host) -> Graphs:
    if importlib.util.find_spec("onnxruntime") is None:
        raise EngineUnavailableError("onnxruntime is not installed; run: pip install 'token2wav[onnx]'")
    from token2wav.engines.onnx_engine import OnnxGraph, check_provider  # an optional dependency

    check_provider(host.device)
    step = host.engines.find("step", host.precision, "onnx", model_folder=host.folder)
    vocoder = host.engines.find("vocoder", "float32", "onnx", model_folder=host.folder)
    threads = host.runtime.threads
    return Graphs("onnx", *(OnnxGraph(path, host.device, threads) for path in (step, vocoder)))


def _tensorrt(host: Host) -> Graphs:
    if host.device.type != "cuda":
        raise EngineUnavailableError(f"tensorrt runs on NVIDIA GPUs, and the device is {host.device}")
    problems = []
    for name in PACKAGES:
        try:
            versions: dict[str, str] = {name: package(name).__version__}
            step = host.engines.find(
                "step",
                host.precision,
                name,
                model_folder=host.folder,
                versions=versions,
                target=target_of(host.device),
            )
            return Graphs("tensorrt", TensorRTGraph(step, name))
        except ConfigError as error:
            problems.append(str(error))
    raise EngineUnavailableError("; ".join(problems))
