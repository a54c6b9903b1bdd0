"""Tensors of Triton's Python backend, from and to arrays.

This module, and every other one that imports it, runs only inside Triton's Python backend, which
provides `triton_python_backend_utils`.

Tensors are passed as DLPack, not as NumPy arrays. Triton starts a process for each Python model,
which it calls a stub. The stubs of servers up to 2.51 misread arrays of NumPy 2: input arrays get
wrong strides, and output arrays lose their bytes. These stubs also crash on tensors of strings.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.errors import InputError
from token2wav_server.engine.frames import LARGEST_FRAME

_set_capsule_name = ctypes.pythonapi.PyCapsule_SetName
_set_capsule_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_USED = b"used_dltensor"  # the capsule stores the address of this name


def array_of(tensor: Any) -> NDArray[Any]:
    """Returns an input tensor as an array, which is a view of Triton's memory.

    Triton frees this memory with the request.

    Raises:
        InputError: the shape is too large. An empty tensor can have such a shape, and the stub of
            server 2.51 crashes if NumPy refuses it. NumPy counts a dimension of 0 as 1. The engine
            accepts no frame with such a shape either.
    """
    values = math.prod(length or 1 for length in tensor.shape())
    if values <= LARGEST_FRAME:
        array = np.from_dlpack(tensor)
        if values * array.itemsize <= LARGEST_FRAME:
            return array
    raise InputError(tensor.name(), "its shape is too large")


def inputs_of(request: Any) -> dict[str, NDArray[Any]]:
    """Returns the input tensors of a request by name, as `array_of` returns each."""
    return {part.name(): array_of(part) for part in request.inputs()}


def tensor_of(name: str, values: NDArray[Any]) -> Any:
    """Returns an output tensor.

    Triton renames the capsule that it has used to "used_dlpack", but the protocol says
    "used_dltensor". NumPy does not know the former, and prints a traceback for each capsule.
    """
    capsule = values.__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    _set_capsule_name(capsule, _USED)
    return tensor
