"""Frames: the messages between the engine and its front.

A frame is a length (4 bytes; it counts the bytes after it), a kind (1 byte) and a payload. All
numbers are little-endian. The front sends `REQUEST` and `CANCELLED`. The engine sends `READY`
first, and then `AUDIO`, `FINISHED` and `FAILED`. A *slot* is a number that the front gives to a
request of Triton. It ends with `FINISHED` or `FAILED`, and is not used again.

`front/native/` has the same protocol in C++. If you change the protocol, change both, and raise
`VERSION`. The functions that parse a frame raise FrameError if the frame has another form.

This module needs neither torch nor Triton.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VERSION = 1
LARGEST_FRAME = 64 << 20  # bytes after the length
REQUEST, CANCELLED = 1, 2
READY, AUDIO, FINISHED, FAILED = 16, 17, 18, 19

_LENGTH = struct.Struct("<I")
_KIND_AND_SLOT = struct.Struct("<BQ")
_NUMBER = struct.Struct("<Q")
_REQUEST_HEAD = struct.Struct("<QBB")  # slot, flags, whether the sequence id is a text
_FAILED_HEAD = struct.Struct("<QB")  # slot, status
_SHORT_SIZE = struct.Struct("<H")
_BYTE = struct.Struct("<B")
_TYPE_AND_RANK = struct.Struct("<BB")
# Types of tensors, by the numbers of `TRITONSERVER_DataType`.
_TYPES = {
    1: np.dtype(np.bool_),
    2: np.dtype(np.uint8),
    3: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    5: np.dtype(np.uint64),
    6: np.dtype(np.int8),
    7: np.dtype(np.int16),
    8: np.dtype(np.int32),
    9: np.dtype(np.int64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
}
_TYPE_NUMBERS = {dtype: number for number, dtype in _TYPES.items()}
# Numbers of `TRITONSERVER_Error_Code`, by the names that Triton's Python backend gives them.
STATUS_NUMBERS = {"UNKNOWN": 0, "INTERNAL": 1, "NOT_FOUND": 2, "INVALID_ARG": 3, "UNAVAILABLE": 4}


class FrameError(Exception):
    """Frame that cannot be parsed. The receiver closes the connection."""


class RequestFrame(NamedTuple):
    """Request of Triton, as the front forwards it.

    Attributes:
        flags: Triton's flags of a sequence: bit 0 for its start, bit 1 for its end.
        sequence_id: a number or a text; 0 or "" without a sequence.
        parameters: JSON object with the parameters; empty for none.
    """

    slot: int
    flags: int
    sequence_id: int | str
    parameters: str
    inputs: dict[str, NDArray[Any]]


class FailedFrame(NamedTuple):
    """Error that ends a slot.

    Attributes:
        status: number of `TRITONSERVER_Error_Code`.
    """

    slot: int
    status: int
    text: str


def request_frame(request: RequestFrame) -> bytes:
    """Returns the frame of a request. Its length may exceed `LARGEST_FRAME`."""
    parts = [_KIND_AND_SLOT.pack(REQUEST, request.slot), bytes([request.flags & 0xFF])]
    if isinstance(request.sequence_id, str):
        text = request.sequence_id.encode()
        parts.append(struct.pack("<BH", 1, len(text)) + text)
    else:
        parts.append(struct.pack("<BQ", 0, request.sequence_id))
    parameters = request.parameters.encode()
    parts.append(_LENGTH.pack(len(parameters)) + parameters)
    return _frame(*parts, *_tensor_parts(request.inputs))


def cancelled_frame(slot: int) -> bytes:
    """Returns the frame which says that the client of a slot has cancelled or vanished."""
    return _frame(_KIND_AND_SLOT.pack(CANCELLED, slot))


def ready_frame() -> bytes:
    """Returns the first frame of an engine."""
    return _frame(struct.pack("<BI", READY, VERSION))


def audio_frame(slot: int, outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Returns the frame of one response: its output tensors by name."""
    return _frame(_KIND_AND_SLOT.pack(AUDIO, slot), *_tensor_parts(outputs))


def finished_frame(slot: int) -> bytes:
    """Returns the frame that ends a slot without an error."""
    return _frame(_KIND_AND_SLOT.pack(FINISHED, slot))


def failed_frame(failed: FailedFrame) -> bytes:
    """Returns the frame that ends a slot with an error."""
    head = _KIND_AND_SLOT.pack(FAILED, failed.slot)
    return _frame(head, bytes([failed.status]), failed.text.encode(errors="replace"))


def parse_request(frame: bytearray) -> RequestFrame:
    """Parses a frame of kind `REQUEST`. Its tensors are views of `frame`."""
    cursor = _Cursor(frame)
    slot, flags, is_text = cursor.numbers(_REQUEST_HEAD)
    sequence_id: int | str
    if is_text > 1:
        raise FrameError(f"the sequence id has the form {is_text}")
    if is_text:
        sequence_id = cursor.text(*cursor.numbers(_SHORT_SIZE))
    else:
        (sequence_id,) = cursor.numbers(_NUMBER)
    # A client may have put anything into a parameter, so bad text must not end the connection.
    parameters = cursor.bytes(*cursor.numbers(_LENGTH)).decode(errors="replace")
    inputs = cursor.tensors()
    cursor.check_end()
    return RequestFrame(slot, flags, sequence_id, parameters, inputs)


def parse_slot(frame: bytearray) -> int:
    """Parses a frame of kind `CANCELLED` or `FINISHED`, and returns its slot."""
    cursor = _Cursor(frame)
    (slot,) = cursor.numbers(_NUMBER)
    cursor.check_end()
    return slot


def parse_ready(frame: bytearray) -> int:
    """Parses a frame of kind `READY`, and returns the version of the protocol."""
    if frame[0] != READY:
        raise FrameError(f"the first frame has kind {frame[0]}")
    cursor = _Cursor(frame)
    (version,) = cursor.numbers(_LENGTH)
    cursor.check_end()
    return version


def parse_audio(frame: bytearray) -> tuple[int, dict[str, NDArray[Any]]]:
    """Parses a frame of kind `AUDIO`. Returns the slot, and the tensors, which are views."""
    cursor = _Cursor(frame)
    (slot,) = cursor.numbers(_NUMBER)
    outputs = cursor.tensors()
    cursor.check_end()
    return slot, outputs


def parse_failed(frame: bytearray) -> FailedFrame:
    """Parses a frame of kind `FAILED`."""
    cursor = _Cursor(frame)
    slot, status = cursor.numbers(_FAILED_HEAD)
    if status not in STATUS_NUMBERS.values():
        raise FrameError(f"the status {status} is unknown")
    return FailedFrame(slot, status, cursor.text(cursor.left))


class FrameBuffer:
    """Buffer of received bytes, which are cut into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> Iterator[bytearray]:
        """Adds received bytes, and yields the frames that are complete now, without their lengths.
        The first byte of a frame is its kind.

        Raises:
            FrameError: a frame is empty, or larger than `LARGEST_FRAME`.
        """
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, start)
                if not 0 < length <= LARGEST_FRAME:
                    raise FrameError(f"a frame has {length} bytes")
                stop = start + _LENGTH.size + length
                if stop > len(self._bytes):
                    return
                # The frame is a copy, because its arrays are views of it.
                frame = self._bytes[start + _LENGTH.size : stop]
                start = stop
                yield frame
        finally:
            del self._bytes[:start]


class _Cursor:
    """Position in a frame, behind its kind. Every method checks that the bytes are there."""

    def __init__(self, frame: bytearray) -> None:
        self._frame = frame
        self._position = 1

    @property
    def left(self) -> int:
        return len(self._frame) - self._position

    def numbers(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._frame, self._skip(layout.size))

    def bytes(self, size: int) -> bytes:
        start = self._skip(size)
        return bytes(self._frame[start : start + size])

    def text(self, size: int) -> str:
        try:
            return self.bytes(size).decode()
        except UnicodeDecodeError as error:
            raise FrameError("a text is not UTF-8") from error

    def tensors(self) -> dict[str, NDArray[Any]]:
        (count,) = self.numbers(_BYTE)
        tensors = {}
        for _ in range(count):
            name = self.text(*self.numbers(_BYTE))
            number, rank = self.numbers(_TYPE_AND_RANK)
            *shape, size = self.numbers(_shape_and_size(rank))
            dtype = _TYPES.get(number)
            if dtype is None:
                raise FrameError(f"{name!r} has the data type {number}")
            items = math.prod(shape)
            # NumPy refuses some shapes of empty arrays. It counts a dimension of 0 as 1.
            counted = math.prod(length or 1 for length in shape) * dtype.itemsize
            if (
                min(shape, default=0) < 0
                or items * dtype.itemsize != size
                or counted > LARGEST_FRAME
            ):
                raise FrameError(f"{name!r} has the shape {tuple(shape)} and {size} bytes")
            array = np.frombuffer(self._frame, dtype, items, self._skip(size))
            tensors[name] = array if rank == 1 else array.reshape(shape)
        return tensors

    def check_end(self) -> None:
        if self.left:
            raise FrameError(f"a frame has {self.left} bytes after its end")

    def _skip(self, size: int) -> int:
        """Moves past some bytes, and returns the position before them."""
        start = self._position
        self._position = start + size
        if self._position > len(self._frame):
            missing = self._position - len(self._frame)
            raise FrameError(f"a frame ends {missing} bytes too early")
        return start


@lru_cache(maxsize=256)
def _shape_and_size(rank: int) -> struct.Struct:
    return struct.Struct(f"<{rank}qQ")


def _frame(*parts: bytes) -> bytes:
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


def _tensor_parts(tensors: Mapping[str, NDArray[Any]]) -> Iterator[bytes]:
    yield bytes([len(tensors)])
    for name, array in tensors.items():
        label = name.encode()
        yield struct.pack(
            f"<B{len(label)}sBB{array.ndim}qQ",
            len(label),
            label,
            _TYPE_NUMBERS[array.dtype],
            array.ndim,
            *array.shape,
            array.nbytes,
        )
        yield array.tobytes()
