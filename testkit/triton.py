"""Stand-in for the module that Triton's Python backend gives to its models."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from testkit.patience import PATIENCE_SECONDS

_set_capsule_name = ctypes.pythonapi.PyCapsule_SetName
_set_capsule_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_USED_BY_TRITON = b"used_dlpack"
_MODULE = "triton_python_backend_utils"


class FakeTriton(SimpleNamespace):
    """Stand-in for `triton_python_backend_utils`. A response is a dictionary of its tensors, or the
    text of its error.

    Attributes:
        models: models that a model can call, by name. Each has one instance, which takes one
            request at a time.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    def __init__(self) -> None:
        super().__init__(models={})
        self._instances: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    class TritonError(str):
        INVALID_ARG, NOT_FOUND, UNAVAILABLE, INTERNAL = (
            "INVALID_ARG",
            "NOT_FOUND",
            "UNAVAILABLE",
            "INTERNAL",
        )

        def __new__(cls, message: str, status: str = INTERNAL) -> FakeTriton.TritonError:
            return super().__new__(cls, f"{status} {message}")

    class Tensor:
        @staticmethod
        def from_dlpack(name: str, capsule: Any) -> tuple[str, Any]:
            """Reads a capsule, and renames it as Triton does, against the protocol."""
            array = from_dlpack(capsule).numpy()
            _set_capsule_name(capsule, _USED_BY_TRITON)
            return name, array

    @staticmethod
    def InferenceResponse(
        tensors: Sequence[tuple[str, Any]] = (), error: str | None = None
    ) -> object:
        return dict(tensors) if error is None else error

    def InferenceRequest(
        self,
        model_name: str,
        requested_output_names: list[str],
        inputs: list[tuple[str, NDArray[Any]]],
    ) -> Any:
        """Returns a request to another model."""

        def execute() -> Any:
            with self._instances[model_name]:
                [response] = self.models[model_name].execute([Request(dict(inputs))])
            failed = isinstance(response, str)
            return SimpleNamespace(
                has_error=lambda: failed,
                error=lambda: SimpleNamespace(message=lambda: response),
                outputs={} if failed else {name: response[name] for name in requested_output_names},
            )

        return SimpleNamespace(exec=execute)

    @staticmethod
    def get_output_tensor_by_name(response: Any, name: str) -> Any:
        return InputTensor(name, response.outputs[name])


class InputTensor:
    """Tensor as a model receives it."""

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self._name, self._array = name, array.copy()

    def name(self) -> str:
        return self._name

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class Request:
    """Request of a client, which is also the sender of its responses. A call of the sender after
    the final response fails, because it would crash tritonserver.

    Attributes:
        responses: response and flags of each call.
        gone: whether the client has left.
    """

    def __init__(
        self,
        inputs: Mapping[str, NDArray[Any]],
        sequence_id: int = 0,
        flags: int = 0,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.inputs: Callable[[], Any] = lambda: [InputTensor(*item) for item in inputs.items()]
        self.correlation_id = lambda: sequence_id
        self.flags = lambda: flags
        self.parameters = lambda: json.dumps(parameters or {})
        self.responses: Queue[tuple[Any, int]] = Queue()
        self.gone = self._over = False

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        assert not self._over, "a question after the final response"
        return self.gone

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self._over, "a response after the final one"
        self.responses.put((response, flags))
        self._over = bool(flags)

    def next(self) -> tuple[Any, int]:
        return self.responses.get(timeout=PATIENCE_SECONDS)


@contextmanager
def triton_module() -> Iterator[FakeTriton]:
    """Puts the stand-in in place of Triton's module, for modules that are imported meanwhile."""
    fake = FakeTriton()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, _MODULE, fake)
        try:
            yield fake
        finally:
            for name, module in [*sys.modules.items()]:
                if vars(module).get("pb_utils") is fake:
                    del sys.modules[name]
