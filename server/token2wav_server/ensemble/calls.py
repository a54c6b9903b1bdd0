"""Calls of a stage in another process.

The calls are the methods of `token2wav.stages.stage.Stage`. A call is a request of Triton with one
tensor of bytes, and its reply is a response with one tensor of bytes. The bytes are a frame of the
engine's protocol (`engine/frames.py`), without its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.errors import (
    BackendError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.stages.stage import FrameChunk, TokenChunk
from token2wav_server.engine.frames import (
    FAILED,
    STATUS_NUMBERS,
    FailedFrame,
    RequestFrame,
    audio_frame,
    failed_frame,
    parse_audio,
    parse_failed,
    parse_request,
    request_frame,
)
from token2wav_server.model_process import is_canary
from token2wav_server.replies import status_of

CALL, REPLY = "call", "reply"  # names of the tensors
_LENGTH_BYTES = 4  # of the length before a frame
_ERRORS: dict[int, type[Token2WavError]] = {
    STATUS_NUMBERS["NOT_FOUND"]: StreamClosedError,
    STATUS_NUMBERS["UNAVAILABLE"]: LimitError,
}

Arrays = dict[str, NDArray[Any]]
Chunk = TokenChunk | FrameChunk


class Call(NamedTuple):
    """Call of a method of a stage.

    Attributes:
        method: `open`, `advance` or `close`.
        facts: arguments that JSON can express.
        arrays: arguments that are arrays, by name.
        ended: handles of streams that have ended, which are closed before the call.
        opened: handle and options of each stream that is opened before the call.
    """

    method: str
    facts: Any
    arrays: Arrays
    ended: list[int]
    opened: Sequence[Sequence[Any]] = ()


def call_bytes(key: str, call: Call) -> NDArray[np.uint8]:
    """Returns the tensor of a call.

    Args:
        key: secret of the server, by which a stage tells the ensemble from clients.
    """
    facts = json.dumps([call.method, call.facts, call.ended, call.opened])
    return _bytes(request_frame(RequestFrame(0, 0, key, facts, call.arrays)))


def call_in(tensor: NDArray[np.uint8]) -> Call:
    """Reads the tensor of a call. Raises InputError if a client has sent it."""
    frame = parse_request(bytearray(tensor))
    if not is_canary(str(frame.sequence_id)):
        raise InputError(CALL, "only the ensemble may call this model, not a client")
    method, facts, ended, opened = json.loads(frame.parameters)
    return Call(method, facts, frame.inputs, ended, opened)


def reply_bytes(outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Returns the tensor of the reply to a call that succeeded."""
    return _bytes(audio_frame(0, outputs))


def error_bytes(error: Token2WavError) -> NDArray[np.uint8]:
    """Returns the tensor of the reply to a call that failed."""
    return _bytes(failed_frame(FailedFrame(0, STATUS_NUMBERS[status_of(error)], str(error))))


def outputs_in(tensor: NDArray[np.uint8]) -> Arrays:
    """Reads the reply to a call, and raises the error in it."""
    frame = bytearray(tensor)
    if frame[0] == FAILED:
        failed = parse_failed(frame)
        raise _ERRORS.get(failed.status, BackendError)(failed.text)
    _, outputs = parse_audio(frame)
    return outputs


def batch_arguments(batch: Sequence[tuple[int, Chunk]]) -> tuple[Any, Arrays]:
    """Returns facts and arrays of the call that computes a batch. The arrays of its chunks are
    joined.
    """
    rows, arrays = [], []
    for handle, chunk in batch:
        position = {}
        if isinstance(chunk, TokenChunk):
            arrays.append(chunk.tokens)
            position = {name: getattr(chunk, name) for name in ("start", "stop", "skip")}
            position["provisional"] = chunk.provisional
        else:
            arrays.append(chunk.frames.T.numpy())
        rows.append([handle, len(arrays[-1]), chunk.last, position])
    return rows, {"joined": np.concatenate(arrays)}


def batch_in(call: Call) -> list[tuple[int, Chunk]]:
    """Returns the batch of `batch_arguments`."""
    parts = _split(call.arrays["joined"], [length for _, length, _, _ in call.facts])
    return [
        (
            handle,
            TokenChunk(part, last=last, **position)
            if position
            else FrameChunk(torch.from_numpy(part).T, last),
        )
        for (handle, _, last, position), part in zip(call.facts, parts, strict=True)
    ]


def result_outputs(results: Sequence[NDArray[Any]]) -> Arrays:
    """Returns the outputs of a batch: mel (bands, frames) or audio (samples,) of each chunk."""
    arrays = [result.T for result in results]
    return {
        "joined": np.concatenate(arrays),
        "lengths": np.array([len(array) for array in arrays], np.int64),
    }


def results_in(outputs: Arrays) -> list[torch.Tensor]:
    """Returns the results of `result_outputs`."""
    parts = _split(outputs["joined"], outputs["lengths"].tolist())
    return [torch.from_numpy(part.T) for part in parts]


def _split(joined: NDArray[Any], lengths: Sequence[int]) -> Iterator[NDArray[Any]]:
    start = 0
    for length in lengths:
        yield joined[start : start + length]
        start += length


def _bytes(frame: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(frame)[_LENGTH_BYTES:], np.uint8)
