"""Requests of clients, parsed into values.

This module defines the names of all input tensors and request parameters. It runs only inside
Triton's Python backend, which provides `triton_python_backend_utils`.

Tensors are passed as DLPack, not as NumPy arrays. Triton starts a process for each Python model,
which it calls a stub. The stubs of servers up to 2.51 misread arrays of NumPy 2: input arrays get
wrong strides, and output arrays lose their bytes. These stubs also crash on tensors of strings.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from token2wav.config.token_format import LATENTS_FP16
from token2wav.errors import InputError
from token2wav.serving.door.message import Message
from token2wav.serving.door.sequences import Owner

_START, _END = 1, 2  # bits of InferenceRequest.flags()


def read_message(request: Any) -> Message:
    """Reads a message from a request of Triton.

    The arrays of the message are views of Triton's memory (see `tensor`). An error in the owner
    only refuses the request.

    Raises:
        InputError: the client name or the stream key is not a string, or is longer than 128
            characters; or the key is empty; or the request has latents of two types.
    """
    sequence_id, flags = request.correlation_id(), request.flags()
    whole = not sequence_id
    parameters = {
        name: value
        for name, value in json.loads(request.parameters() or "{}").items()
        if not _of_triton(name)
    }
    inputs = {part.name(): _array(part) for part in request.inputs()}
    names = [name for name in ("tokens", "latents", LATENTS_FP16) if name in inputs]
    if len(names) > 1:
        raise InputError(names[1], f"sent together with {names[0]}; send only one of them")
    tokens = inputs.pop(names[0]) if names else None
    return Message(
        sequence_id,
        start=whole or bool(flags & _START),
        end=whole or bool(flags & _END),
        owner=Owner.of(parameters),
        parameters=parameters,
        tokens=np.zeros(0, np.int32) if tokens is None else tokens,
        voice_inputs=inputs,
    )


def _of_triton(name: str) -> bool:
    return name.startswith("triton_") or name in (
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
    )


def tensor(request: Any, name: str) -> NDArray[Any] | None:
    """Returns an input tensor of a request, or None if the request has no such tensor.

    The array is a view of Triton's memory, which is freed once the request has been answered.
    """
    triton_tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if triton_tensor is None else _array(triton_tensor)


def _array(triton_tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = from_dlpack(triton_tensor.to_dlpack()).numpy()
    return array
