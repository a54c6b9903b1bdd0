"""Calls of TensorRT and ONNX Runtime for a GPU.

No engine can be loaded without a GPU. So stand-ins of the engine and its contexts record the calls.
They refuse names that the real package does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import onnxruntime
import pytest
import torch

from token2wav.errors import BackendError, BackendUnavailableError
from token2wav.exported import run
from token2wav.exported.run import (
    KERNELS,
    OnnxModule,
    TensorRTModule,
    cuda_options,
    package,
)

CPU = torch.device("cpu")
MEMORY = 4096  # bytes that the largest shapes need
COMPILED = b"kernels of this GPU"
SHAPES = {"x": (2, 80, 50), "past_key_0": (2, 100, 64)}
OTHER_SHAPES = {"x": (4, 80, 50), "past_key_0": (4, 100, 64)}


class FakeEngine:
    """Engine with one profile, and a package that loads it.

    Attributes:
        contexts: execution contexts that were made, with their arguments.
        trt: the package: its real classes and enumerations, but an own `Runtime`.
        kernels: cache of compiled kernels, of TensorRT-RTX.
        options: configuration of the contexts.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        self.contexts: list[tuple[MagicMock, Any]] = []
        self.engine = create_autospec(real.ICudaEngine, instance=True)
        self.engine.device_memory_size_v2 = MEMORY
        self.engine.num_optimization_profiles = 1
        self.engine.get_tensor_profile_shape.side_effect = self._profile
        self.engine.create_execution_context.side_effect = self._context
        self.capturable = True
        self.options = create_autospec(real.IRuntimeConfig, instance=True)
        self.kernels = create_autospec(real.IRuntimeCache, instance=True)
        self.kernels.serialize.return_value = COMPILED
        self.kernels.deserialize.side_effect = lambda blob: blob == COMPILED
        self.options.create_runtime_cache.return_value = self.kernels
        self.engine.create_runtime_config.return_value = self.options
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda blob: self.engine)
        self.trt = SimpleNamespace(
            __version__=real.__version__,
            ExecutionContextAllocationStrategy=real.ExecutionContextAllocationStrategy,
            DynamicShapesKernelSpecializationStrategy=(
                real.DynamicShapesKernelSpecializationStrategy
            ),
            Runtime=lambda logger: runtime,
        )

    @staticmethod
    def _profile(name: str, profile: int) -> tuple[tuple[int, ...], ...]:
        low, high = {
            "x": ((2, 80, 1), (8, 80, 200)),
            "past_key_0": ((2, 0, 64), (8, 1600, 64)),
        }[name]
        return low, high, high

    def _context(self, options: Any) -> MagicMock:
        context = create_autospec(self.real.IExecutionContext, instance=True)
        context.is_stream_capturable.return_value = self.capturable
        self.contexts.append((context, options))
        return context


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stream of a GPU; it can be set to capture."""
    made = SimpleNamespace(cuda_stream=7, synchronize=lambda: None, capturing=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


@pytest.fixture(params=["tensorrt_rtx", "tensorrt"])
def name(request: pytest.FixtureRequest) -> str:
    """Package. The classes are those of TensorRT-RTX in both cases, as its interface is larger."""
    package: str = request.param
    return package


@pytest.fixture
def fake(stream: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    try:
        real = package("tensorrt_rtx")
    except BackendUnavailableError:
        pytest.skip("needs TensorRT-RTX: pip install tensorrt-rtx-cu13")
    made = FakeEngine(real)
    monkeypatch.setattr(run, "package", lambda name: made.trt)
    monkeypatch.setattr(run, "logger", lambda name: None)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    engine = tmp_path / "step-float16.engine"
    engine.write_bytes(b"engine")
    return engine


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def load(path: Path, name: Any) -> TensorRTModule:
    return TensorRTModule(path, name, CPU)


def test_all_contexts_share_one_block_of_memory(fake: FakeEngine, path: Path, name: str) -> None:
    module = load(path, name)
    for shapes in (SHAPES, OTHER_SHAPES, SHAPES):
        module.run(tensors(shapes), {"velocity": torch.zeros(1)})
    assert len(fake.contexts) == 2  # one for each combination of shapes
    blocks = [context.set_device_memory.call_args.args for context, _ in fake.contexts]
    assert blocks[0] == blocks[1]
    assert blocks[0] == (module._memory.data_ptr(), MEMORY)
    managed = fake.real.ExecutionContextAllocationStrategy.USER_MANAGED
    for context, options in fake.contexts:
        context.execute_async_v3.assert_called_with(7)
        if name == "tensorrt":
            assert options == managed
        else:
            assert options is fake.options
    if name == "tensorrt_rtx":
        fake.options.set_execution_context_allocation_strategy.assert_called_with(managed)


def test_kernels_are_compiled_before_a_capture(fake: FakeEngine, path: Path, name: str) -> None:
    load(path, name)
    if name == "tensorrt_rtx":
        strategy = fake.options.dynamic_shapes_kernel_specialization_strategy
        assert strategy == fake.real.DynamicShapesKernelSpecializationStrategy.EAGER
    else:
        fake.engine.create_runtime_config.assert_not_called()


def test_an_engine_that_cannot_be_captured(
    fake: FakeEngine, path: Path, name: str, stream: SimpleNamespace
) -> None:
    fake.capturable = False
    module = load(path, name)
    module.run(tensors(SHAPES), {})
    stream.capturing = True
    with pytest.raises(BackendError, match="the engine cannot be captured; build it again"):
        module.run(tensors(SHAPES), {})


def test_kernels_are_kept_beside_the_engine(fake: FakeEngine, path: Path, name: str) -> None:
    file = path.with_name(path.name + KERNELS)
    load(path, name).save_kernels()
    if name == "tensorrt":
        assert not file.exists()
        return
    assert file.read_bytes() == COMPILED
    assert sorted(path.parent.iterdir()) == [path, file]
    written = file.stat().st_mtime_ns
    load(path, name).save_kernels()  # nothing new
    fake.kernels.deserialize.assert_called_once_with(COMPILED)
    assert file.stat().st_mtime_ns == written
    file.write_bytes(b"of another GPU")
    load(path, name).save_kernels()
    assert file.read_bytes() == COMPILED


def test_a_folder_that_cannot_be_written_is_no_error(
    fake: FakeEngine, path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_bytes(self: Path, blob: bytes) -> int:
        raise OSError(30, "Read-only file system")

    module = load(path, name)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    module.save_kernels()
    assert list(path.parent.iterdir()) == [path]


# ONNX Runtime.


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))


@pytest.mark.parametrize(("handle", "expected"), [(7, "7"), (0, "1")])
def test_options_of_the_cuda_provider(
    stream: SimpleNamespace, gpu_memory: None, handle: int, expected: str
) -> None:
    """Handle 0 is the default stream for torch, and no stream for ONNX Runtime."""
    stream.cuda_stream = handle
    assert cuda_options(torch.device("cuda:1")) == {
        "device_id": "1",
        "use_tf32": "0",
        "user_compute_stream": expected,
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": str((100 << 30) // 10),  # half of the 20 % that the cache leaves
    }


def test_a_graph_on_a_gpu_does_not_wait(
    stream: SimpleNamespace, gpu_memory: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = create_autospec(onnxruntime.InferenceSession, instance=True)
    session.get_inputs.return_value = []
    session_providers: list[Any] = []

    def made(path: Path, options: Any, providers: list[Any]) -> MagicMock:
        session_providers.extend(providers)
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", made)
    device = torch.device("cuda:1")
    module = OnnxModule(tmp_path / "step.onnx", device)
    assert session_providers == [
        ("CUDAExecutionProvider", cuda_options(device)),
        "CPUExecutionProvider",
    ]
    module.run({"x": torch.zeros(2)}, {"velocity": torch.zeros(2)})
    _, options = session.run_with_iobinding.call_args.args
    assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
