"""Stand-in for the module that Triton's Python backend gives to its models."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch.utils.dlpack import from_dlpack

_set_capsule_name = ctypes.pythonapi.PyCapsule_SetName
_set_capsule_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_USED_BY_TRITON = b"used_dlpack"


class FakeTriton(SimpleNamespace):
    """Stand-in for `triton_python_backend_utils`. A response is a dictionary of its tensors, or the
    text of its error.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    class TritonError(str):
        INVALID_ARG, NOT_FOUND, UNAVAILABLE, INTERNAL = (
            "INVALID_ARG",
            "NOT_FOUND",
            "UNAVAILABLE",
            "INTERNAL",
        )

        def __new__(cls, message: str, status: str) -> FakeTriton.TritonError:
            return super().__new__(cls, f"{status} {message}")

    class Tensor:
        @staticmethod
        def from_dlpack(name: str, capsule: Any) -> tuple[str, Any]:
            """Reads a capsule, and renames it as Triton does, against the protocol."""
            array = from_dlpack(capsule).numpy()
            _set_capsule_name(capsule, _USED_BY_TRITON)
            return name, array

    @staticmethod
    def get_input_tensor_by_name(request: Any, name: str) -> Any:
        return next((part for part in request.inputs() if part.name() == name), None)

    @staticmethod
    def InferenceResponse(
        tensors: Sequence[tuple[str, Any]] = (), error: str | None = None
    ) -> object:
        return dict(tensors) if error is None else error
