"""Requests of Triton's Python backend, read into messages, for the stages of the ensemble.

This module runs only inside Triton's Python backend, which provides `triton_python_backend_utils`.

Tensors are passed as DLPack, not as NumPy arrays. Triton starts a process for each Python model,
which it calls a stub. The stubs of servers up to 2.51 misread arrays of NumPy 2: input arrays get
wrong strides, and output arrays lose their bytes. These stubs also crash on tensors of strings.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from token2wav.serving.door.message import Message
from token2wav_server.requests import message_of


def read_message(request: Any) -> Message:
    """Reads a message from a request of Triton.

    The arrays of the message are views of Triton's memory (see `tensor`).

    Raises:
        InputError: as in `message_of`.
    """
    inputs = {part.name(): _array(part) for part in request.inputs()}
    return message_of(request.correlation_id(), request.flags(), request.parameters(), inputs)


def tensor(request: Any, name: str) -> NDArray[Any] | None:
    """Returns an input tensor of a request, or None if the request has no such tensor.

    The array is a view of Triton's memory, which is freed once the request has been answered.
    """
    triton_tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if triton_tensor is None else _array(triton_tensor)


def _array(triton_tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = from_dlpack(triton_tensor.to_dlpack()).numpy()
    return array
