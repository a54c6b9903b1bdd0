"""Stand-in for the module that Triton's Python backend gives to its models."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


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
        def from_dlpack(name: str, array: Any) -> tuple[str, Any]:
            return name, array

    @staticmethod
    def InferenceResponse(
        tensors: Sequence[tuple[str, Any]] = (), error: str | None = None
    ) -> object:
        return dict(tensors) if error is None else error
