"""Requests of Triton's Python backend, read into messages, for the stages of the ensemble.

This module runs only inside Triton's Python backend, which provides `triton_python_backend_utils`.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav.serving.door.message import Message
from token2wav_server.requests import message_of
from token2wav_server.triton_tensors import array_of


def read_message(request: Any) -> Message:
    """Reads a message from a request of Triton.

    The arrays of the message are views of Triton's memory (see `tensor`).

    Raises:
        InputError: as in `message_of` and `array_of`.
    """
    inputs = {part.name(): array_of(part) for part in request.inputs()}
    return message_of(request.correlation_id(), request.flags(), request.parameters(), inputs)


def tensor(request: Any, name: str) -> NDArray[Any] | None:
    """Returns an input tensor of a request, or None if the request has no such tensor.

    The array is a view of Triton's memory, which is freed once the request has been answered.
    """
    triton_tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if triton_tensor is None else array_of(triton_tensor)
