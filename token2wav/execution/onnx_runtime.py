"""Exported graphs on ONNX Runtime, on a CPU or a CUDA device, reading and writing torch's memory in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from token2wav.errors import EngineUnavailableError

_TYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64}


def check_provider(device: torch.device) -> None:
    """Refuses a device that this build of ONNX Runtime cannot use.

    Raises:
        EngineUnavailableError: it has no CUDA provider, but the device is a GPU.
    """
    if device.type == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise EngineUnavailableError(
            f"onnxruntime {onnxruntime.__version__} has no CUDA provider; run: "
            "pip uninstall onnxruntime; pip install 'token2wav[onnx-gpu]'"
        )


def session(path: Path, device: torch.device) -> Any:
    """An `onnxruntime.InferenceSession`.

    Args:
        path: of the graph; its weights lie beside it.
        device: where it is to run.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Idle threads would spin, and take the cores from torch, which runs between two calls.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0, "use_tf32": 0}))
    return onnxruntime.InferenceSession(path, options, providers=providers)


class OnnxGraph:
    """A graph that runs on torch's tensors.

    Args:
        path: of the graph.
        device: where it is to run.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._session = session(path, device)
        self._device = device
        self._inputs = {value.name: value for value in self._session.get_inputs()}

    @property
    def cache_type(self) -> torch.dtype:
        return torch.float16 if self._inputs["past_key_0"].type == "tensor(float16)" else torch.float32

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return True

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Runs the graph and waits for it; tensors by name, contiguous, on the graph's device."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # ONNX Runtime has a stream of its own
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
        self._session.run_with_iobinding(binding)
