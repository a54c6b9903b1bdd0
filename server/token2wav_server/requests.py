"""Requests on the wire, read into messages: names of input tensors, and parameters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.config.token_format import LATENTS_FP16
from token2wav.errors import InputError
from token2wav.serving.door.message import Message
from token2wav.serving.door.sequences import Owner, SequenceId

_START, _END = 1, 2  # Triton's flags of a request


def message_of(
    sequence_id: SequenceId, flags: int, parameters: str, inputs: dict[str, NDArray[Any]]
) -> Message:
    """Returns the message in a request of Triton.

    An error in the owner only refuses the request.

    Args:
        flags: Triton's flags of the request: bit 0 for the start of a sequence, bit 1 for its end.
        parameters: JSON object with the parameters, as Triton's Python backend gives them; empty
            for none.
        inputs: tensors by name. Tokens are removed.

    Raises:
        InputError: the client name or the stream key is not a string, or is longer than 128
            characters; or the key is empty.
    """
    whole = not sequence_id
    values = {
        name: value
        for name, value in json.loads(parameters or "{}").items()
        if not _of_triton(name)
    }
    names = [name for name in ("tokens", "latents", LATENTS_FP16) if name in inputs]
    error = None
    if len(names) > 1:
        error = InputError(names[1], f"sent together with {names[0]}; send only one of them")
    tokens = inputs.pop(names[0]) if names else None
    return Message(
        sequence_id,
        start=whole or bool(flags & _START),
        end=whole or bool(flags & _END),
        owner=Owner.of(values),
        parameters=values,
        tokens=np.zeros(0, np.int32) if tokens is None else tokens,
        voice_inputs=inputs,
        error=error,
    )


def _of_triton(name: str) -> bool:
    return name.startswith("triton_") or name in (
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
    )
