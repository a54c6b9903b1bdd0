"""An engine without a model: it speaks the protocol of the engine's socket, as a test tells it."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.patience import PATIENCE_SECONDS

# Numbers of TRITONSERVER_DataType
DTYPES: dict[int, Any] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
}
_NUMBERS = {np.dtype(dtype): number for number, dtype in DTYPES.items()}
REQUEST, CANCELLED, READY, AUDIO, FINISHED, FAILED = 1, 2, 16, 17, 18, 19


@dataclass(frozen=True)
class Forwarded:
    """Request that a front has forwarded."""

    slot: int
    flags: int
    sequence: int | str
    parameters: dict[str, Any]
    inputs: dict[str, NDArray[Any]]


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<IB", 1 + len(payload), kind) + payload


def tensor(name: str, array: NDArray[Any]) -> bytes:
    label = name.encode()
    head = struct.pack(f"<B{len(label)}sBB", len(label), label, _NUMBERS[array.dtype], array.ndim)
    return head + struct.pack(f"<{array.ndim}qQ", *array.shape, array.nbytes) + array.tobytes()


def audio_frame(slot: int, outputs: dict[str, NDArray[Any]]) -> bytes:
    tensors = b"".join(tensor(name, array) for name, array in outputs.items())
    return frame(AUDIO, struct.pack("<QB", slot, len(outputs)) + tensors)


def finished_frame(*slots: int) -> bytes:
    """Returns a frame for each slot."""
    return b"".join(frame(FINISHED, struct.pack("<Q", slot)) for slot in slots)


def failed_frame(slot: int, status: int, text: str) -> bytes:
    return frame(FAILED, struct.pack("<QB", slot, status) + text.encode())


class FakeEngine:
    """Listens on a socket, and serves one front after the other until it is stopped.

    Attributes:
        requests: requests in their order.
        cancelled: slots that were cancelled, each with the time of `time.monotonic`.
        reading: the engine reads only while it is set.

    Args:
        greeting: first bytes of each connection.
    """

    def __init__(self, path: Path, greeting: bytes = frame(READY, struct.pack("<I", 1))) -> None:
        self.requests: queue.Queue[Forwarded] = queue.Queue()
        self.cancelled: queue.Queue[tuple[int, float]] = queue.Queue()
        self.reading = threading.Event()
        self.reading.set()
        self._greeting = greeting
        self._connected = threading.Event()
        self._connection: socket.socket | None = None
        self._stopped = False
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_front(self) -> None:
        assert self._connected.wait(PATIENCE_SECONDS), "no front has connected"

    def request(self) -> Forwarded:
        return self.requests.get(timeout=PATIENCE_SECONDS)

    def send(self, *frames: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(b"".join(frames))

    def stop(self) -> None:
        """Ends without a word, as a killed process does."""
        self._stopped = True
        self.reading.set()
        for open_socket in (self._listener, self._connection):
            if open_socket is not None:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with self._listener:
            while not self._stopped:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # stopped
                    return
                self._connection = connection
                with connection, suppress(OSError):
                    connection.sendall(self._greeting)
                    self._connected.set()
                    self._read(connection)
                self._connected.clear()

    def _read(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb", buffering=1 << 16)
        while self.reading.wait() and (head := stream.read(5)):
            length, kind = struct.unpack("<IB", head)
            payload = stream.read(length - 1)
            if kind == CANCELLED:
                self.cancelled.put((*struct.unpack("<Q", payload), time.monotonic()))
            else:
                assert kind == REQUEST
                self.requests.put(read_request(payload))


def read_request(payload: bytes) -> Forwarded:
    """Reads a request frame after its kind."""
    position = 0

    def take(layout: str) -> Any:
        nonlocal position
        values = struct.unpack_from("<" + layout, payload, position)
        position += struct.calcsize("<" + layout)
        return values[0] if len(values) == 1 else values

    def data(size: int) -> bytes:
        nonlocal position
        position += size
        return payload[position - size : position]

    slot, flags, is_text = take("QBB")
    sequence: int | str = data(take("H")).decode() if is_text else take("Q")
    parameters = data(take("I")).decode()
    inputs = {}
    for _ in range(take("B")):
        name = data(take("B")).decode()
        dtype = np.dtype(DTYPES[take("B")])
        shape = [take("q") for _ in range(take("B"))]
        array = np.frombuffer(data(take("Q")), dtype)
        inputs[name] = array.reshape(shape)
    assert position == len(payload)
    return Forwarded(slot, flags, sequence, json.loads(parameters) if parameters else {}, inputs)
